/* What libraries of today have and those of glibc 2.28's time lack. With these definitions the library loads
 * under both. tools/older_glibc.py chooses the versions of the functions that both have. */

#include <new>
#include <sstream>

#ifdef __GLIBCXX__
template class std::basic_stringbuf<char>; /* libstdc++ 11's str() const & */
template class std::basic_ostringstream<char>;

namespace std {
void __throw_bad_array_new_length() {
    throw bad_array_new_length();
}
} // namespace std

/* glibc 2.32's, which libstdc++'s headers read. 0: shared_ptr counts with atomic instructions. */
extern "C" [[gnu::visibility("hidden")]] char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif
