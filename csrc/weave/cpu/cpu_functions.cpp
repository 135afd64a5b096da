#include "cpu_functions.h"

#include "own_attention.h"
#include "own_products.h"
#include "receiver_of_process.h"
#include "thin_products.h"

#include <cstring>

namespace {

struct Function {
    const char * name;
    void *       address;
};

#define OA_FUNCTION(function)                                                                                          \
    { #function, reinterpret_cast < void *>(&(function)) }

const Function functions[] = {
    OA_FUNCTION(oa_attend_alone),
    OA_FUNCTION(oa_attend_kernel),
    OA_FUNCTION(oa_attend_refusal),
    OA_FUNCTION(oa_attend_takes),
    OA_FUNCTION(oa_attend_use),
    OA_FUNCTION(oa_products_has),
    OA_FUNCTION(oa_products_kernel),
    OA_FUNCTION(oa_products_refusal),
    OA_FUNCTION(oa_products_takes),
    OA_FUNCTION(oa_products_use),
    OA_FUNCTION(oa_thin_has),
    OA_FUNCTION(oa_thin_refusal),
    OA_FUNCTION(oa_thin_takes),
    OA_FUNCTION(oa::weave::make_receiver),
    OA_FUNCTION(oa::weave::receiver_stats),
    OA_FUNCTION(oa::weave::set_receiver),
    OA_FUNCTION(oa::weave::set_receiver_from_environment),
};

} // namespace

void * oa_cpu_function(const char * name) {
    for (const Function & function : functions) {
        if (std::strcmp(function.name, name) == 0) {
            return function.address;
        }
    }
    return nullptr;
}
