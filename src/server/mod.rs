//! HTTP: routes, API types, streaming, metrics.
