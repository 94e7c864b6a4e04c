//! The only reader of files and environment: typed, parsed once, refused at start in one sentence.
