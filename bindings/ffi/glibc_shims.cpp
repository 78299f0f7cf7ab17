// What a static libstdc++ of a newer distribution asks for, and glibc 2.28 does not have. Compiled into the module
// where it is linked with an older glibc's libraries (FLASH_QLA_GLIBC_STUBS); hidden, so that no other library finds
// them here.
#include <sys/random.h>
#include <cerrno>
#include <cstdint>
#include <cstdlib>

extern "C" {

// libstdc++ takes atomic instructions for reference counts where this is 0: right in a process of any number of
// threads.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// glibc 2.36. std::random_device is its only caller.
__attribute__((visibility("hidden"))) uint32_t arc4random() {
  uint32_t value;
  ssize_t length;
  do {
    length = getrandom(&value, sizeof value, 0);
  } while (length < 0 && errno == EINTR);
  if (length != sizeof value) {
    std::abort();  // like glibc's own: there is no error that a caller could be told of
  }
  return value;
}
}
