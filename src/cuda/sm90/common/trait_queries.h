// What the traits of a kernel may say, and do not where they have no such member.
#pragma once

namespace flash_qla::cuda::sm90 {

template <typename Traits>
inline constexpr bool kStagesStates = requires { requires Traits::kStagesStates; };
template <typename Traits>
inline constexpr bool kKeepsA = requires { requires Traits::kKeepsA; };

}  // namespace flash_qla::cuda::sm90
