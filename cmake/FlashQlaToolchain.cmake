# Stops with a sentence where the library cannot be built, before a compiler says it in its own words.
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  message(FATAL_ERROR "flash_qla can be built for Linux alone, and this build is for ${CMAKE_SYSTEM_NAME}.")
endif()

include(CheckCXXSourceCompiles)
set(FLASH_QLA_COMPILES_CXX20 FALSE)
if("cxx_std_20" IN_LIST CMAKE_CXX_COMPILE_FEATURES)
  # The first compilers that took the option knew little of the language.
  check_cxx_source_compiles([[
    #include <type_traits>
    struct Pair { int a, b; };
    template <class T> constexpr bool has_a = requires(T x) { x.a; };
    template <auto value> struct Value {};
    static_assert(has_a<std::remove_cvref_t<const Pair&>> && !has_a<int>);
    int main() {
      constexpr Pair pair{.a = 1, .b = 2};
      return [](auto... x) { return []<int n>(Value<n>) { return n; }(Value<2>{}) + (x + ... + 0); }(pair.b);
    }
  ]] FLASH_QLA_CXX20_WORKS)
  set(FLASH_QLA_COMPILES_CXX20 ${FLASH_QLA_CXX20_WORKS})
endif()
if(NOT FLASH_QLA_COMPILES_CXX20)
  message(FATAL_ERROR
          "flash_qla needs a compiler for C++20, and ${CMAKE_CXX_COMPILER} (${CMAKE_CXX_COMPILER_ID} "
          "${CMAKE_CXX_COMPILER_VERSION}) is none: GCC 12 is what the tests run with. "
          "Name a newer one in CXX or with -DCMAKE_CXX_COMPILER.")
endif()
