# Finds CUDA's compiler and enables the language.
#
# flash_qla_enable_cuda(<mode> <result>) with mode ON, OFF or AUTO sets <result> to ON or OFF in the caller's scope:
#   AUTO  ON where a compiler is found
#   ON    stops with a message where none is found
# Looked at in this order: CMAKE_CUDA_COMPILER and the environment's CUDACXX as they are given; nvcc on PATH, under
# CUDA_HOME or CUDA_PATH, or in /usr/local/cuda; the compiler packages of PyPI in the Python environment that builds.

# The oldest compiler the sources are kept to: the first whose CCCL has every cuda::ptx instruction that they use.
set(FLASH_QLA_MINIMUM_NVCC 12.8)

# The same packages stand in tools/build_backend.py, which asks for them where a wheel is built without a toolkit.
set(FLASH_QLA_NVCC_PACKAGES "nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85")

# "release 13.0, V13.0.88" -> 13.0; empty where the file does not run.
function(_flash_qla_nvcc_version nvcc result)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE code)
  if(code EQUAL 0 AND text MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
  else()
    set(${result} "" PARENT_SCOPE)
  endif()
endfunction()

# Root of the PyPI toolkit (site-packages/nvidia/cu13), or empty.
function(_flash_qla_pypi_toolkit result)
  set(${result} "" PARENT_SCOPE)
  find_package(Python COMPONENTS Interpreter QUIET)
  if(NOT Python_Interpreter_FOUND)
    return()
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "
import importlib.util, os
spec = importlib.util.find_spec('nvidia')
for place in (spec.submodule_search_locations if spec else []):
    if os.path.exists(os.path.join(place, 'cu13', 'bin', 'nvcc')):
        print(os.path.join(place, 'cu13'))
        break
"
    OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE code)
  if(code EQUAL 0)
    set(${result} "${root}" PARENT_SCOPE)
  endif()
endfunction()

# A macro, because enable_language() works in the scope of the directory that calls it.
macro(flash_qla_enable_cuda mode result)
  set(${result} OFF)
  if(NOT "${mode}" MATCHES "^(AUTO|ON|OFF|TRUE|FALSE|YES|NO|1|0)$")
    message(FATAL_ERROR "FLASH_QLA_CUDA is '${mode}': give ON, OFF or AUTO")
  endif()
  if("${mode}" STREQUAL "AUTO" OR ${mode})
    set(_flash_qla_reason "no nvcc was found")
    if(DEFINED CMAKE_CUDA_COMPILER)
      set(_flash_qla_nvcc "${CMAKE_CUDA_COMPILER}")
      _flash_qla_nvcc_version("${_flash_qla_nvcc}" _flash_qla_nvcc_version)
    elseif(DEFINED ENV{CUDACXX})
      set(_flash_qla_nvcc "$ENV{CUDACXX}")
      _flash_qla_nvcc_version("${_flash_qla_nvcc}" _flash_qla_nvcc_version)
    else()
      find_program(_flash_qla_path_nvcc nvcc
                   HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
      set(_flash_qla_nvcc "")
      set(_flash_qla_nvcc_version "")
      if(_flash_qla_path_nvcc)
        set(_flash_qla_nvcc "${_flash_qla_path_nvcc}")
        _flash_qla_nvcc_version("${_flash_qla_nvcc}" _flash_qla_nvcc_version)
      endif()
      if(NOT _flash_qla_nvcc_version OR _flash_qla_nvcc_version VERSION_LESS FLASH_QLA_MINIMUM_NVCC)
        _flash_qla_pypi_toolkit(_flash_qla_pypi_root)
        if(_flash_qla_pypi_root)
          set(_flash_qla_nvcc "${_flash_qla_pypi_root}/bin/nvcc")
          _flash_qla_nvcc_version("${_flash_qla_nvcc}" _flash_qla_nvcc_version)
        endif()
      endif()
    endif()

    if(_flash_qla_nvcc_version AND _flash_qla_nvcc_version VERSION_LESS FLASH_QLA_MINIMUM_NVCC)
      set(_flash_qla_reason "${_flash_qla_nvcc} is release ${_flash_qla_nvcc_version}")
    elseif(_flash_qla_nvcc_version)
      set(${result} ON)
    elseif(_flash_qla_nvcc)
      set(_flash_qla_reason "${_flash_qla_nvcc} does not run")
    endif()

    if(${result})
      message(STATUS "flash_qla: CUDA kernels with ${_flash_qla_nvcc} (release ${_flash_qla_nvcc_version})")
      set(CMAKE_CUDA_COMPILER "${_flash_qla_nvcc}" CACHE FILEPATH "CUDA compiler")
      if("${CMAKE_CUDA_COMPILER}" MATCHES "/nvidia/cu13/bin/nvcc$")
        # The packages keep their libraries in lib, where nvcc's own profile looks in lib64.
        get_filename_component(FLASH_QLA_PYPI_CUDA_LIBRARIES "${CMAKE_CUDA_COMPILER}/../../lib" ABSOLUTE)
        string(APPEND CMAKE_CUDA_FLAGS_INIT " -L${FLASH_QLA_PYPI_CUDA_LIBRARIES}")
      endif()
      if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
        # Every target under src/cuda names its own; this one is for the compiler's self-test.
        set(CMAKE_CUDA_ARCHITECTURES 90a-real)
      endif()
      enable_language(CUDA)
      if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
        # CMake 3.25 does not know yet that nvcc 12 takes it.
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
      endif()
      set(CMAKE_CUDA_STANDARD 20)
      set(CMAKE_CUDA_STANDARD_REQUIRED ON)
      set(CMAKE_CUDA_EXTENSIONS OFF)
      set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    elseif("${mode}" STREQUAL "AUTO")
      message(STATUS "flash_qla: no CUDA kernels, ${_flash_qla_reason} (${FLASH_QLA_MINIMUM_NVCC} or newer is needed)")
    else()
      message(FATAL_ERROR
              "FLASH_QLA_CUDA=ON, but ${_flash_qla_reason}, and CUDA ${FLASH_QLA_MINIMUM_NVCC} or newer is needed.\n"
              "Put nvcc on PATH, or install the compiler from PyPI into the Python environment that builds:\n"
              "  pip install ${FLASH_QLA_NVCC_PACKAGES}\n"
              "or build the CPU backend alone with -DFLASH_QLA_CUDA=OFF.")
    endif()
  endif()
endmacro()
