#include "backend/cpu/quant.h"

const int8_t bml_q4_levels[16] = {-127, -100, -78, -61, -47, -33, -21, -9,
                                  2,    13,   24,  36,  50,  65,  82,  105};
