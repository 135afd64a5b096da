// Where the tensors of a GGUF file lie in it. llama.cpp's own interface does not say.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct oa_tensor_place {
    std::string          name;
    std::vector<int64_t> ne;
    uint64_t             offset; // from the beginning of the file
    uint64_t             nbytes;
};

struct oa_file_outline {
    std::string                  arch;
    int                          n_parts; // files that the model is split into; 1 where it is not
    std::vector<oa_tensor_place> tensors; // of this file
};

// Throws std::invalid_argument where the file is no GGUF, or is cut off in its header.
oa_file_outline oa_tensor_places(const std::string & path);
