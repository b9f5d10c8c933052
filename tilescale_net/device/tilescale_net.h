// Everything that a kernel can call; what the compiler adds to a kernel.
#pragma once

#include "atomic.h"
#include "barrier.h"
#include "order.h"
#include "put.h"
#include "rows.h"
#include "signal.h"
#include "vector.h"
#include "wait.h"
