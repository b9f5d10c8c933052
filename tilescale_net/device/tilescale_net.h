// All device functions for kernels; the compiler includes it in every kernel.
#pragma once

#include "atomic.h"
#include "barrier.h"
#include "order.h"
#include "put.h"
#include "rows.h"
#include "signal.h"
#include "vector.h"
#include "wait.h"
