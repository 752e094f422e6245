//! Picture files to RGB bytes, under limits.
