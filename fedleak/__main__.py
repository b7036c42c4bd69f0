"""`python -m fedleak` is `fedleak`."""

from fedleak.cli import app

app(prog_name="fedleak")
