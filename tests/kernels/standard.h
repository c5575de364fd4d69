// What the sources that run on the CPU include of the standard library; on_host.py compiles it once.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <ucontext.h>
