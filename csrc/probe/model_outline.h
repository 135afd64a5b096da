// A model file without its vocabulary and its weights: the same metadata and tensor list, data that is a hole.
// llama.cpp reads a vocabulary of 262 000 tokens in 0.6 s at every load, and a plan takes some twenty dry runs.
#pragma once

#include <memory>
#include <string>

class oa_model_outline {
  public:
    // The outline of the file at `path`, made once per process as long as the file does not change. llama.cpp's own
    // parts of a split model, and files that are no GGUF, have none: path() is then the file itself.
    static std::shared_ptr<const oa_model_outline> of(const std::string & path);

    explicit oa_model_outline(const std::string & path);
    ~oa_model_outline();
    oa_model_outline(const oa_model_outline &)             = delete;
    oa_model_outline & operator=(const oa_model_outline &) = delete;

    // What llama.cpp loads in place of the file; valid as long as this object.
    const std::string & path() const { return path_; }

  private:
    std::string path_;
    int         file_ = -1; // in memory
};
