# Finds the headers of Eigen 3.4 or newer (nothing of Eigen is linked): in FLASH_QLA_EIGEN_INCLUDE_DIR if that is given,
# as an installed package (libeigen3-dev), or in the cmeel-eigen package of the active Python. Defines the target
# FlashQla::EigenHeaders.
include(FindPackageHandleStandardArgs)

set(FLASH_QLA_EIGEN_INCLUDE_DIR "" CACHE PATH "Folder that holds Eigen/Core; empty: searched for")
set(EigenHeaders_INCLUDE_DIR "${FLASH_QLA_EIGEN_INCLUDE_DIR}")

if(NOT EigenHeaders_INCLUDE_DIR)
  find_package(Eigen3 3.4 QUIET NO_MODULE)
  if(TARGET Eigen3::Eigen)
    get_target_property(EigenHeaders_INCLUDE_DIR Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
  endif()
endif()

if(NOT EigenHeaders_INCLUDE_DIR)
  find_package(Python QUIET COMPONENTS Interpreter)
  if(Python_Interpreter_FOUND)
    # All of sys.path: pip puts the packages of an isolated build in front of the interpreter's own.
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "
import os, sys
for place in sys.path:
    include = os.path.join(place, 'cmeel.prefix', 'include', 'eigen3')
    if os.path.exists(os.path.join(include, 'Eigen', 'Core')):
        print(include)
        break
"
      OUTPUT_VARIABLE EigenHeaders_INCLUDE_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()

if(EigenHeaders_INCLUDE_DIR AND NOT EXISTS "${EigenHeaders_INCLUDE_DIR}/Eigen/Core")
  message(FATAL_ERROR "FLASH_QLA_EIGEN_INCLUDE_DIR (${EigenHeaders_INCLUDE_DIR}) must hold Eigen/Core")
endif()

find_package_handle_standard_args(EigenHeaders
  REQUIRED_VARS EigenHeaders_INCLUDE_DIR
  REASON_FAILURE_MESSAGE
    "Install it (apt-get install libeigen3-dev, or pip install cmeel-eigen) or set FLASH_QLA_EIGEN_INCLUDE_DIR")
if(EigenHeaders_FOUND AND NOT TARGET FlashQla::EigenHeaders)
  add_library(FlashQla::EigenHeaders INTERFACE IMPORTED)
  target_include_directories(FlashQla::EigenHeaders SYSTEM INTERFACE "${EigenHeaders_INCLUDE_DIR}")
endif()
