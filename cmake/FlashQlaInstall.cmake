# Install rules of the C and C++ library: component "flash_qla". The Python binding installs itself as "python".
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

install(TARGETS flash_qla EXPORT flash_qlaTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT flash_qla
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT flash_qla
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT flash_qla
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/flash_qla" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT flash_qla FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT flash_qla)

get_target_property(FLASH_QLA_LIBRARY_TYPE flash_qla TYPE)
# A static library leaves what it needs to whoever links it; pkg-config would tell only with --static, so its one line
# of libraries says it for a static installation.
set(FLASH_QLA_PC_LIBS "")
set(FLASH_QLA_CONFIG_NEEDS_CUDART OFF)
if(FLASH_QLA_LIBRARY_TYPE STREQUAL "STATIC_LIBRARY")
  set(FLASH_QLA_PC_LIBS " -lstdc++ -lm -lpthread")
  if(FLASH_QLA_CUDA)
    set(FLASH_QLA_CONFIG_NEEDS_CUDART ON)
    find_library(FLASH_QLA_CUDART_STATIC cudart_static REQUIRED NO_DEFAULT_PATH
                 PATHS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} ${FLASH_QLA_PYPI_CUDA_LIBRARIES})
    get_filename_component(FLASH_QLA_CUDART_DIR "${FLASH_QLA_CUDART_STATIC}" DIRECTORY)
    string(APPEND FLASH_QLA_PC_LIBS " ${FLASH_QLA_CUDART_STATIC} -lrt -ldl")
  endif()
endif()

set(FLASH_QLA_CONFIG_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/flash_qla)
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/flash_qlaConfig.cmake.in" "${PROJECT_BINARY_DIR}/flash_qlaConfig.cmake"
  INSTALL_DESTINATION ${FLASH_QLA_CONFIG_DIR} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/flash_qlaConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(EXPORT flash_qlaTargets NAMESPACE flash_qla:: DESTINATION ${FLASH_QLA_CONFIG_DIR} COMPONENT flash_qla)
install(FILES "${PROJECT_BINARY_DIR}/flash_qlaConfig.cmake" "${PROJECT_BINARY_DIR}/flash_qlaConfigVersion.cmake"
  DESTINATION ${FLASH_QLA_CONFIG_DIR} COMPONENT flash_qla)

file(RELATIVE_PATH FLASH_QLA_PC_PREFIX "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" FLASH_QLA_PC_PREFIX "${FLASH_QLA_PC_PREFIX}")
configure_file("${PROJECT_SOURCE_DIR}/cmake/flash_qla.pc.in" "${PROJECT_BINARY_DIR}/flash_qla.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/flash_qla.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT flash_qla)
