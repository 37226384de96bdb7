// Products with quantised weights as Python calls them.
#include "quantized.h"

extern "C" void slipstream_quantized(const Quantized* call) { multiply(*call); }
