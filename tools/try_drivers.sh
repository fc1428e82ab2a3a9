#!/bin/sh
# SPDX-License-Identifier: MIT
#
# Runs tests on the OpenCL drivers of Debian 13: Mesa's rusticl, whose device is the processor
# (llvmpipe), and PoCL 6.
#
#     tools/try_drivers.sh FOLDER [pytest's arguments]
#
# As root, on a machine with debootstrap. FOLDER becomes a root of Debian 13, or is one already. It has
# the drivers, so the machine's own are left as they are. The tests are those of TESTS, unless arguments
# name others; each driver's summary is at the end. The exit status is 1 if a test fails.
set -eu
TESTS="tests/attention/test_attention.py tests/attention/test_kernel_contract.py tests/diagonal
    tests/doors/test_onnx.py tests/doors/test_openvino.py tests/doors/test_directml.py"
PACKAGES=mesa-opencl-icd,pocl-opencl-icd,python3-venv,python3-dev,gcc,libc6-dev

root=$(realpath -m "$1")
shift
checkout=$(realpath "$(dirname "$0")/..")

if [ ! -x "$root/usr/bin/python3" ]; then
    debootstrap --variant=minbase --include="$PACKAGES" trixie "$root"
fi
mkdir -p "$root/src"
mounted=
for place in proc sys dev; do
    mountpoint -q "$root/$place" || { mount --bind "/$place" "$root/$place"; mounted="$place $mounted"; }
done
trap 'for place in $mounted; do umount "$root/$place"; done' EXIT

# pip reaches what it reaches outside.
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf; do
    [ ! -f "$file" ] || cp "$file" "$root$file"
done
cp -r /etc/ssl/certs/. "$root/etc/ssl/certs/"

(cd "$checkout" && git ls-files -z | tar --null -T - -c) | tar -x -C "$root/src"
version=$(cd "$checkout" && git rev-parse --short HEAD)
inside() { chroot "$root" env HOME=/root RUSTICL_ENABLE=llvmpipe "$@"; }
[ -x "$root/venv/bin/pip" ] || inside python3 -m venv /venv
inside env "SETUPTOOLS_SCM_PRETEND_VERSION=0+$version" /venv/bin/pip install -q --force-reinstall --no-deps /src
inside /venv/bin/pip install -q numpy ml_dtypes onnx pytest pytest-xdist hypothesis

inside /venv/bin/python -m clattn
status=0
for driver in rusticl "portable computing"; do
    echo "== $driver"
    inside env "CLATTN_TEST_DEVICES=$driver" sh -c 'cd /src && exec /venv/bin/python -m pytest -q -n 2 -p no:cacheprovider "$@"' \
        sh ${*:-$TESTS} || status=1
done
exit $status
