# Tests of the house itself, by scripts: rooms, documents, the width of lines, headers.
foreach(script layering layering_selftest docs columns snippets captures user_program sizes)
  add_test(NAME host.${script} COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/${script}.sh)
  set_tests_properties(host.${script} PROPERTIES
                       LABELS host ENVIRONMENT "CXX=${CMAKE_CXX_COMPILER}")
endforeach()

# What the shared library exports and needs.
if(BUILD_SHARED_LIBS)
  add_test(NAME host.abi COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/abi.sh $<TARGET_FILE:clattn>)
  set_tests_properties(host.abi PROPERTIES LABELS host)
endif()

# Where there is Python, which the scripts of bench/ are written in.
find_package(Python3 COMPONENTS Interpreter QUIET)
if(Python3_FOUND)
  add_test(NAME host.bench_scripts COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/bench_scripts.sh)
  set_tests_properties(host.bench_scripts PROPERTIES LABELS host)
endif()
