// What the traits of a kernel may say, and do not where they have no such member.
#pragma once

namespace flash_qla::cuda::sm90 {

template <typename Traits>
inline constexpr bool kCompactCode = requires { requires Traits::kCompactCode; };
template <typename Traits>
inline constexpr bool kSavesA = requires { requires Traits::kSavesA; };

}  // namespace flash_qla::cuda::sm90
