//! The chat page at `/`: plain files compiled into the binary, so it works offline.

use axum::extract::Path;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// Name, content type, content.
const FILES: &[(&str, &str, &str)] = &[
    ("index.html", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("chat.js", "text/javascript; charset=utf-8", include_str!("page/chat.js")),
    ("markdown.js", "text/javascript; charset=utf-8", include_str!("page/markdown.js")),
    ("monitor.js", "text/javascript; charset=utf-8", include_str!("page/monitor.js")),
];

/// Nothing is loaded from elsewhere, no inline script runs, nobody frames the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

fn serve(name: &str) -> Response {
    let Some((_, kind, content)) = FILES.iter().find(|f| f.0 == name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let mut response = (*content).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// `GET /`
pub async fn index() -> Response {
    serve("index.html")
}

/// `GET /page/{name}`
pub async fn file(Path(name): Path<String>) -> Response {
    serve(&name)
}
