# CMake toolchain file: compiles for Linux on aarch64 with glibc 2.28, on any machine, with Clang and libc++ from the PyPI package
# ziglang. tools/wheel.sh writes the two commands that it names, and puts their folder into ZIG_COMMANDS.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER "$ENV{ZIG_COMMANDS}/zig-c++")
set(CMAKE_AR "$ENV{ZIG_COMMANDS}/zig-ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "$ENV{ZIG_COMMANDS}/zig-ranlib" CACHE FILEPATH "")
