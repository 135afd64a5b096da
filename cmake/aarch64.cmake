# Toolchain for aarch64 on another machine (scripts/aarch64.sh). OALLAMA_ROOT: a Debian for arm64 with Python's headers.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES OALLAMA_ROOT)
set(Python_INCLUDE_DIR ${OALLAMA_ROOT}/usr/include/python3.11 CACHE PATH "")
set(Python_LIBRARY ${OALLAMA_ROOT}/usr/lib/aarch64-linux-gnu/libpython3.11.so CACHE PATH "")
# pybind11 would ask this machine's Python.
set(PYTHON_MODULE_EXTENSION .cpython-311-aarch64-linux-gnu.so CACHE INTERNAL "")
set(PYTHON_IS_DEBUG FALSE CACHE INTERNAL "")
