// Which sources a library was compiled from.
#include "attnkit.h"

extern "C" ATTNKIT_API const char *attnkit_sources() { return ATTNKIT_SOURCES; }
