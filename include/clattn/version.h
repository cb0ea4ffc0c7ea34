#ifndef CLATTN_VERSION_H
#define CLATTN_VERSION_H

/* The version of these headers, in C and C++: the one place that has it. CMake, the packages and
   Python read it from here. clattn::version() and clattn_version() say that of the library that a
   program runs with. */

/** Raised by versions that break programs, from 1.0 on. */
#define CLATTN_VERSION_MAJOR 0
/** Raised by new functions; before 1.0 also by versions that break programs. */
#define CLATTN_VERSION_MINOR 1
/** Raised by versions that only repair. */
#define CLATTN_VERSION_PATCH 0

/** "0.1.0" */
#define CLATTN_VERSION \
  CLATTN_VERSION_TEXT_(CLATTN_VERSION_MAJOR, CLATTN_VERSION_MINOR, CLATTN_VERSION_PATCH)
/** For CLATTN_VERSION alone. */
#define CLATTN_VERSION_TEXT_(major, minor, patch) CLATTN_VERSION_JOIN_(major, minor, patch)
/** As CLATTN_VERSION_TEXT_. */
#define CLATTN_VERSION_JOIN_(major, minor, patch) #major "." #minor "." #patch

#endif
