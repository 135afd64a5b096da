// What a router sends where the process of a model did not end its answer: an error as JSON where nothing was sent yet;
// in a stream an event with the error, and then the connection is cut. Hook of patch 0011.
#pragma once

#include "server-common.h"

#include <atomic>
#include <cpp-httplib/httplib.h>
#include <string>
#include <utility>

class oa_proxied_answer {
  public:
    std::atomic<bool> is_cut{ false }; // what was sent is no whole answer

    // of_model: by a llama-server of ours; other hosts' answers go on as they come.
    explicit oa_proxied_answer(bool of_model) : of_model_(of_model) {}

    void begin(const httplib::Response & response) {
        is_stream_ = of_model_ && response.get_header_value("Content-Type").rfind("text/event-stream", 0) == 0;
    }

    // What goes on of the bytes that came: of a stream whole events alone.
    std::string pass(const char * data, size_t n) {
        rest_.append(data, n);
        const size_t      end  = is_stream_ ? rest_.rfind("\n\n") : rest_.size();
        const std::string pass = end == std::string::npos ? "" : rest_.substr(0, is_stream_ ? end + 2 : end);
        rest_.erase(0, pass.size());
        return pass;
    }

    // What is left at the end of a whole answer.
    std::string rest() { return std::move(rest_); }

    // The status, and what is sent last. begun: headers were sent.
    std::pair<int, std::string> end_early(bool begun, httplib::Error error) {
        is_cut = begun;

        const bool   unreachable = error == httplib::Error::Connection || error == httplib::Error::ConnectionTimeout;
        const int    status      = unreachable ? 503 : 502;
        const char * what = unreachable ? "cannot be reached" : begun ? "did not end its answer" : "did not answer";
        json shown = format_error_response(std::string(of_model_ ? "the process of this model " : "the other host ") +
                                               what + " (" + httplib::to_string(error) + ")",
                                           unreachable ? ERROR_TYPE_UNAVAILABLE : ERROR_TYPE_SERVER);
        shown["code"]          = status;
        const std::string text = safe_json_to_str({ { "error", shown } });
        return { status, !begun ? text : is_stream_ ? "event: error\ndata: " + text + "\n\n" : "" };
    }

  private:
    const bool  of_model_;
    bool        is_stream_ = false;
    std::string rest_;
};
