# Tests of the house itself, by scripts: rooms and documents.
foreach(script layering layering_selftest docs)
  add_test(NAME host.${script} COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/${script}.sh)
  set_tests_properties(host.${script} PROPERTIES LABELS host)
endforeach()
