# Sourced by the other scripts: makes the project's virtual environment and installs the project into it.
#
#   PYTHON  the interpreter to start from (default: python3; 3.10 or newer)
#   VENV    where the environment lies (default: .venv in the project)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 10):
    sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}. Set PYTHON to a newer one.")
PY

# install EXTRAS: the project with extras such as "[dev]", editable, only when pyproject.toml has changed since.
install() {
    local stamp="$VENV/installed$1"
    if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
        [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".$1"
        touch "$stamp"
    fi
}
