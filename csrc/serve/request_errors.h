// Whose fault an exception of a request's handler is. Hooks of patch 0011.
#pragma once

#include "json.h"
#include "server-common.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>

// The model's output cannot be read, as a tool call for example: no fault of the request.
class oa_output_error : public std::exception {
  public:
    explicit oa_output_error(std::string what) : what_(std::move(what)) {}

    const char * what() const noexcept override { return what_.c_str(); }

  private:
    std::string what_;
};

// A body that is no JSON or has fields of other types is the request's fault. So is any other runtime_error of a
// model's server: it is thrown while a request is read, for what a template refuses, or tools. A router throws one
// where the process of a model is not there. for_model: by its path the request is one for a model.
inline error_type oa_error_of(const std::exception & error, bool has_body, bool for_model, bool is_router) {
    if (dynamic_cast<const common_json_error *>(&error)) {
        return ERROR_TYPE_INVALID_REQUEST;
    }
    if (!dynamic_cast<const std::runtime_error *>(&error) || dynamic_cast<const std::system_error *>(&error)) {
        return ERROR_TYPE_SERVER;
    }
    if (is_router) {
        return for_model ? ERROR_TYPE_UNAVAILABLE : ERROR_TYPE_SERVER;
    }
    return has_body ? ERROR_TYPE_INVALID_REQUEST : ERROR_TYPE_SERVER;
}
