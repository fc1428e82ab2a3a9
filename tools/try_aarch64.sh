#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# Builds and tests clattn on emulated 64-bit Arm: Debian 12 with PoCL in a folder, run by QEMU.
#
#     tools/try_aarch64.sh FOLDER [pytest's arguments]
#
# It needs root, Linux 6.7 or later, debootstrap and qemu-user-static from Debian, and a Python with
# pip. FOLDER keeps the system and the build, so a second call begins with the build. The
# user namespace in which all Arm programs run has formats of programs of its own: the machine's
# stay as they are. Without arguments for pytest, tests run that call each operator with few
# programs, because PoCL takes long to build a program here.
set -euo pipefail

test $# -ge 1 || { sed -n 's/^# \{0,1\}//; 3,13p' "$0"; exit 2; }
folder=$(realpath -m "$1")
shift
project=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
root=$folder/debian
python=${PYTHON:-python3}
emulator=$(command -v qemu-aarch64-static)
packages=cmake,g++,ninja-build,ocl-icd-libopencl1,pocl-opencl-icd,python3-dev,python3-venv
tests=("$@")
test $# -gt 0 || tests=(tests/diagonal/test_diagonal.py)

# Starts a program of this machine in a new user namespace, where QEMU runs Arm's programs.
emulated() {
    local go=$folder/go
    rm -f "$go"
    mkfifo "$go"
    unshare --user --mount --pid --fork bash -ec '
        read -r _ <"$1"
        mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
        magic="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
        mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
        echo -n ":aarch64:M::$magic:$mask:$2:F" >/proc/sys/fs/binfmt_misc/register
        mount -t proc proc "$3/proc"
        mount --rbind /sys "$3/sys" # PoCL reads there how much memory there is
        shift 3
        exec "$@"' bash "$go" "$emulator" "$root" "$@" &
    local child=$!
    # The namespace may not be there yet.
    until echo 0 0 65536 2>/dev/null >/proc/$child/uid_map; do sleep 0.05; done
    echo 0 0 65536 >/proc/$child/gid_map
    echo >"$go"
    wait $child
}

inside() {
    emulated chroot "$root" env -i HOME=/root LANG=C.UTF-8 PATH=/usr/bin:/bin:/usr/sbin:/sbin \
        "$@"
}

if ! test -e "$folder/installed"; then
    rm -rf "$root"
    mkdir -p "$root"
    debootstrap --arch=arm64 --variant=minbase --foreign --include=$packages bookworm "$root"
    # In the namespace nobody makes devices.
    for device in null:3 zero:5 full:7 random:8 urandom:9; do
        test -e "$root/dev/${device%:*}" || mknod -m 666 "$root/dev/${device%:*}" c 1 "${device#*:}"
    done
    inside container=lxc /debootstrap/debootstrap --second-stage # which tries to make devices else
    "$python" -m pip download --quiet --only-binary=:all: --python-version 3.11 \
        --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --dest "$root/wheels" \
        build hypothesis ml_dtypes numpy pytest pytest-xdist scikit-build-core setuptools-scm
    inside python3 -m venv /venv
    inside /venv/bin/pip install --quiet --no-index --find-links /wheels \
        hypothesis ml_dtypes numpy pytest pytest-xdist scikit-build-core setuptools-scm
    touch "$folder/installed"
fi

rm -rf "$root/clattn"
mkdir "$root/clattn"
git -C "$project" ls-files -z --cached --others --exclude-standard |
    tar -C "$project" --null --files-from=- -c | tar -C "$root/clattn" -x
inside sh -ec 'cd /clattn
    /venv/bin/pip install --quiet --no-index --no-build-isolation --no-deps \
        --config-settings=build-dir=/build --config-settings=cmake.define.CLATTN_WERROR=ON .
    uname -m
    /venv/bin/python -m clattn
    exec /venv/bin/python -m pytest -p no:cacheprovider "$@"' sh "${tests[@]}"
