#!/usr/bin/env bash
# Makes the environments of the systems that cannot share the project's: build/peers/torchrec and build/peers/horovod.
#
#     benchmarks/peers/environments.sh PYTHON TORCH        as in: ... python3.11 torch==2.13.0
#
# What is there is kept. Horovod is compiled, which takes minutes and needs cmake and a C++ compiler; where that fails,
# the reason stays in build/peers/horovod.txt and the lab runs without it.

set -euo pipefail
python=$1 torch=$2
cd "$(dirname "$0")/../.."
mkdir -p build/peers

make_environment() { # name, packages...
    echo "making build/peers/$1 with $torch"
    "$python" -m venv --clear "build/peers/$1"
    "build/peers/$1/bin/pip" install -qq "$torch" numpy "${@:2}"
}

torchrec() {
    make_environment torchrec tensordict torchmetrics iopath pyre-extensions
    # Their metadata asks for fbgemm-gpu, which needs CUDA, and for an old torchmetrics; both run without.
    build/peers/torchrec/bin/pip install -qq --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
    build/peers/torchrec/bin/python -c 'import torchrec'
    touch build/peers/torchrec/.ready
}

# Horovod 0.28.1, its last release, is of 2023: it asks for C++14, where torch's headers need C++17, and for a CMake
# older than any current one allows. Its process sets forget which interface they were told to use, and would meet on
# the loopback; the last edit hands it on.
horovod() {
    make_environment horovod 'setuptools<80' wheel packaging cloudpickle psutil pyyaml cffi
    local source=build/peers/horovod-source
    if [ ! -d "$source/horovod-0.28.1" ]; then
        build/peers/horovod/bin/pip download -qq --no-deps --no-binary :all: --no-build-isolation -d "$source" \
            horovod==0.28.1
        tar -xf "$source/horovod-0.28.1.tar.gz" -C "$source"
    fi
    cd "$source/horovod-0.28.1"
    sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' CMakeLists.txt horovod/torch/CMakeLists.txt
    sed -i '/::InitializeForProcessSet(/,/CreateDevice/s/iface = gloo_iface_/iface = global_context.gloo_iface_/' \
        horovod/common/gloo/gloo_context.cc
    CMAKE_POLICY_VERSION_MINIMUM=3.5 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_PYTORCH=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_CPU_OPERATIONS=GLOO \
        ../../horovod/bin/pip install --no-build-isolation --no-deps .
    cd ../..  # away from the sources, which Python would import in place of what was built
    horovod/bin/python -c 'import horovod.torch; assert horovod.torch.gloo_built()'
    touch horovod/.ready
}

[ -e build/peers/torchrec/.ready ] || torchrec
if [ ! -e build/peers/horovod/.ready ]; then
    echo 'building Horovod, which takes some minutes (build/peers/horovod.txt)'
    # A process of its own: `set -e` has no effect on what is tested by `if`.
    if ! PYTHON=$python TORCH=$torch bash -c "set -euo pipefail; python=\$PYTHON torch=\$TORCH
        $(declare -f make_environment horovod); horovod" >build/peers/horovod.txt 2>&1; then
        echo 'Horovod could not be built; its last lines:' >&2
        tail -n 5 build/peers/horovod.txt >&2
    fi
fi
