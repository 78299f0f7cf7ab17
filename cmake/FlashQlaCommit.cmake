# Run by the build: writes OUTPUT from TEMPLATE with the commit of SOURCE_DIR, and leaves the file alone where nothing has changed.
# A tree that differs from its commit has "+changes" behind it; a folder that is not the root of a git checkout (an sdist, a copy
# in another project's repository) has no commit that could be told.
set(git git -C "${SOURCE_DIR}" --no-optional-locks)
set(FLASH_QLA_COMMIT unknown)
execute_process(COMMAND ${git} rev-parse --show-prefix --short=12 HEAD
                OUTPUT_VARIABLE answer RESULT_VARIABLE code ERROR_QUIET)
# Two lines: where in the checkout this folder is (nothing: at its root), and the commit.
if(code EQUAL 0 AND answer MATCHES "^\n([0-9a-f]+)\n$")
  set(FLASH_QLA_COMMIT ${CMAKE_MATCH_1})
  execute_process(COMMAND ${git} status --porcelain --untracked-files=no OUTPUT_VARIABLE changes ERROR_QUIET)
  if(NOT changes STREQUAL "")
    string(APPEND FLASH_QLA_COMMIT "+changes")
  endif()
endif()
configure_file("${TEMPLATE}" "${OUTPUT}" @ONLY)
