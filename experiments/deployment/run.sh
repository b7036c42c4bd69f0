#!/bin/sh
# A real federation on 127.0.0.1, from nothing to the report, without containers:
#
#   experiments/deployment/run.sh [FOLDER]       FOLDER: left out, runs/deployment; it must not exist
#
# federation.py says what is started, and ends it all however this ends.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python}" "$here/federation.py" "${1:-runs/deployment}"
