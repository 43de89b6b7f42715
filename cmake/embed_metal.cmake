# cmake -DOUTPUT=FILE.c -DDIRECTORY=DIR "-DFILES=a.h;b.metal" -P embed_metal.cmake
# The Metal program as one C string: FILES of DIRECTORY one after the other, without the includes of
# each other, which the compiler on the user's machine could not find.
set(text "")
foreach(file ${FILES})
  file(READ ${DIRECTORY}/${file} part)
  string(REGEX REPLACE "#include \"[^\n]*\n" "" part "${part}")
  string(REPLACE "#pragma once\n" "" part "${part}")
  string(REPLACE "\\" "\\\\" part "${part}")
  string(REPLACE "\"" "\\\"" part "${part}")
  string(REPLACE "\n" "\\n\"\n\"" part "${part}")
  string(APPEND text "\"${part}\"\n")
endforeach()
file(WRITE ${OUTPUT}
     "extern const char bml_metal_source[];\nconst char bml_metal_source[] =\n${text};\n")
