#include "guest_totals.h"

namespace oa::weave {

GuestTotals & guest_totals() {
    static GuestTotals totals;
    return totals;
}

} // namespace oa::weave
