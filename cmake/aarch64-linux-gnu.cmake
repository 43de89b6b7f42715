# Cross-builds for 64-bit Arm on Debian and runs tests under qemu: see tests/portability/run.sh.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
if(BML_CLANG)
  set(CMAKE_C_COMPILER clang)
  set(CMAKE_C_COMPILER_TARGET aarch64-linux-gnu)
else()
  set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
endif()
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES BML_CLANG)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static)
# Libraries of this machine's other architecture (dpkg --add-architecture arm64).
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/aarch64-linux-gnu/pkgconfig:/usr/share/pkgconfig)
