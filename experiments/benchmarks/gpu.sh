#!/usr/bin/env bash
# Does all that needs a GPU in one call of under nine minutes, on a machine that may have nothing but
# Python 3.11 or newer and an NVIDIA driver. What it does and writes: gpu.sh --help, or gpu.py.
#
# PYTHON names the interpreter; else that of .venv here, else python3. What it lacks of pyproject.toml
# is installed with pip, in the versions of constraints.txt, into .venv-gpu, which sees the
# packages of an interpreter whose PyTorch has CUDA. Without the network give pip a folder of wheels:
# PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER. What cannot be installed is said, and fails its parts alone.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
benchmarks=$root/experiments/benchmarks
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ -x $root/.venv/bin/python ]] && python=$root/.venv/bin/python
fi
[[ " $* " == *" --help "* || " $* " == *" -h "* ]] && exec "$python" "$benchmarks/gpu.py" --help
dry=no
[[ " $* " == *" --dry-run "* ]] && dry=yes

"$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" || {
  echo "gpu.sh: $python is not Python 3.11 or newer: set PYTHON" >&2
  exit 1
}

# Whether an interpreter's PyTorch is there and has what is asked of it.
has_torch() {
  "$1" -c "import torch; raise SystemExit(not ('$dry' == 'yes' or torch.cuda.is_available()))" \
    2>/dev/null
}

# What an interpreter lacks, a requirement in each line.
lacking() { "$1" "$benchmarks/gpu_packages.py" lacking; }

fits() { [[ -x $(command -v "$1") && -z $(lacking "$1") ]] && has_torch "$1"; }

own=$root/.venv-gpu
if ! fits "$python" && ! fits "$own/bin/python"; then
  if has_torch "$python"; then
    "$python" -m venv --without-pip --clear "$own"
    # Not --system-site-packages: of a virtual environment that would be what is below it.
    "$python" -c "import sys; print(*[p for p in sys.path if p.endswith('-packages')], sep='\n')" \
      >"$("$own/bin/python" -c "import site; print(site.getsitepackages()[0])")/below.pth"
  else
    "$python" -m venv --clear "$own"
  fi
  "$own/bin/python" "$benchmarks/gpu_packages.py" constraints >"$own/constraints.txt"
  lacking "$own/bin/python" >"$own/lacking.txt"
  echo "gpu.sh: installs $(paste -sd' ' "$own/lacking.txt")" >&2
  install() {
    timeout 300 "$own/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 \
      --constraint "$own/constraints.txt" "$@"
  }
  if ! install --requirement "$own/lacking.txt" && ((SECONDS < 60)); then
    # One that cannot be had shall not keep the others out.
    while read -r one; do
      install "$one" || echo "gpu.sh: $one cannot be installed: what needs it will fail" >&2
    done <"$own/lacking.txt"
  fi
  if ! has_torch "$own/bin/python"; then
    echo "gpu.sh: $own has no PyTorch that sees a CUDA device: set PYTHON, or use --dry-run" >&2
    exit 1
  fi
  python=$own/bin/python
elif ! fits "$python"; then
  python=$own/bin/python
fi

export PYTHONPATH=$root:$benchmarks${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TQDM_DISABLE=1
# Else a look at whether there is a GPU keeps processes that are forked later from using it.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
exec "$python" "$benchmarks/gpu.py" --spent "$SECONDS" "$@"
