// How the tests of emulated kernels lay out a call's tensors.
#pragma once

#include "buffers.h"

namespace flash_qla::testing {

// AddressSanitizer sees every access past the end of an allocation; without it canaries tell of writes.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr Arena::Pieces kPieces = Arena::Pieces::kExact;
#else
inline constexpr Arena::Pieces kPieces = Arena::Pieces::kGuarded;
#endif

}  // namespace flash_qla::testing
