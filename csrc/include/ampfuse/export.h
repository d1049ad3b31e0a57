#pragma once

/// Exports a symbol. The library hides all symbols without this mark.
#define AMPFUSE_API __attribute__((visibility("default")))
