#pragma once

// The library hides every symbol but those marked here.
#define AMPFUSE_API __attribute__((visibility("default")))
