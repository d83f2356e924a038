# Shared by the scripts beside it; source it, do not run it.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${QCONVERT_VENV:-$ROOT/.venv}"

# Python would put the working directory on sys.path, and from the repository root the source folders would then be
# importable as `kernels`, `formats`, `runtime`, `convert`. What runs here is the installed package, nothing else.
export PYTHONSAFEPATH=1
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH
# Installs leave bytecode to the first import: without it every process would compile torch anew.
unset PYTHONDONTWRITEBYTECODE

say() { printf '%s\n' "== $*"; }
die() {
    printf '%s\n' "$*" >&2
    exit 1
}

# The interpreter that makes the environments: $PYTHON, else the first one that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    printf '%s\n' "Python 3.11 or newer is needed and was not found (set PYTHON to its path)" >&2
    return 1
}

# make_venv DIR: create it unless it is there and works.
make_venv() {
    local python
    "$1/bin/python" -c 'import pip' 2>/dev/null && return
    python="$(find_python)" || return 1
    say "creating $1 with $("$python" --version)"
    "$python" -m venv --clear "$1" && return 0
    printf '%s\n' "cannot create $1 (on Debian and Ubuntu: apt install python3-venv)" >&2
    return 1
}

# pip_install VENV ARGUMENTS...: quiet unless it fails. Bytecode is left to the first import: most modules of torch
# and transformers are never imported, and compiling them takes longer than unpacking them.
pip_install() {
    local venv="$1" log code=0
    shift
    log="$(mktemp)"
    ${PIP_TIME_LIMIT:-} "$venv/bin/python" -m pip install -q --no-compile "$@" >"$log" 2>&1 </dev/null || code=$?
    [ $code -eq 0 ] || cat "$log" >&2
    rm -f "$log"
    return $code
}

# install_project VENV [EXTRA]: a normal (not editable) install, with the dependencies pinned by constraints.txt.
# Dependencies are looked at again only when a file that names them changed; the project is installed again when one of
# its files changed, or what is installed is not what was: with it go the kernels that were compiled for it.
install_project() {
    local venv="$1" extra="${2:-}" stamp want stage code=0
    make_venv "$venv" || return 1
    stamp="$venv/.qconvert-dependencies${extra:+-$extra}"
    want="$(cat "$ROOT/constraints.txt" "$ROOT/pyproject.toml" | cksum)"
    # Built from a copy: setuptools would otherwise leave build/ in the tree and pack stale files from it next time.
    stage="$(mktemp -d)"
    install_copy "$venv" "$extra" "$stamp" "$want" "$stage" || code=1
    rm -rf "$stage"
    return $code
}

install_copy() {
    local venv="$1" extra="$2" stamp="$3" want="$4" stage="$5" sources
    copy_source "$stage" || return 1
    # Before the build, which leaves its own files there.
    sources="$(cd "$stage" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 cksum | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
        say "installing dependencies${extra:+ (extra: $extra)}"
        pip_install "$venv" -c "$ROOT/constraints.txt" setuptools || return 1
        pip_install "$venv" -c "$ROOT/constraints.txt" --no-build-isolation "$stage${extra:+[$extra]}" || return 1
        # What an extra asks for comes on top of what the project itself needs.
        printf '%s\n' "$want" | tee "$venv/.qconvert-dependencies" >"$stamp"
    elif [ "$(cat "$venv/.qconvert-installed" 2>/dev/null)" != "$sources $(installed "$venv")" ]; then
        pip_install "$venv" --no-deps --no-build-isolation --force-reinstall "$stage" || return 1
    else
        return 0
    fi
    printf '%s\n' "$sources $(installed "$venv")" >"$venv/.qconvert-installed"
}

# A checksum of what pip says it has installed as the project: files, their checksums, where they come from.
installed() { cat "$1"/lib/python3*/site-packages/qconvert-*.dist-info/RECORD 2>/dev/null | cksum; }

# What a build reads, and nothing else.
copy_source() {
    (
        cd "$ROOT" || exit 1
        tar -c --exclude=__pycache__ --exclude='*.egg-info' \
            pyproject.toml README.md LICENSE src kernels formats runtime convert
    ) | tar -x -C "$1"
}
