//! What every request passes first: who may talk to this server, and that nothing leaves it unshaped.
//!
//! - `Host` and `Origin` are checked, so that a web page cannot reach a loopback server by re-pointing its own name to
//!   127.0.0.1 (DNS rebinding), or post to it across origins.
//! - API keys are compared in constant time.
//! - A panic in a handler becomes a 500 of that request; refusals become JSON in the path's dialect.

use super::app::App;
use super::error::{ApiError, Dialect, Reason};
use axum::body::{Body, BodyDataStream};
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::Response;
use futures::{FutureExt, StreamExt};
use sha2::{Digest, Sha256};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use subtle::ConstantTimeEq;

/// Paths that need no key: what a browser or a load balancer asks before it can send one.
const OPEN_PATHS: &[&str] = &["/", "/health", "/v1/health"];

/// The outermost layer.
pub async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    let dialect = Dialect::of(&path);
    let origin = request.headers().get(ORIGIN).cloned();
    let mut response = match admit(&app, request.uri(), &method, request.headers()) {
        Err(error) => error.render(dialect),
        Ok(()) if method == Method::OPTIONS => preflight(),
        Ok(()) => match receive(request, app.settings.max_body, app.settings.read_timeout).await {
            Err(error) => error.render(dialect),
            Ok(request) => match AssertUnwindSafe(next.run(request)).catch_unwind().await {
                Ok(response) => shape(response, dialect, &path),
                Err(_) => ApiError::internal("a fault in the server ended this request").render(dialect),
            },
        },
    };
    if let Some(allowed) = origin.filter(|o| cors_allows(&app, o)) {
        let headers = response.headers_mut();
        headers.insert("access-control-allow-origin", allowed);
        headers.insert("vary", HeaderValue::from_static("Origin"));
    }
    let status = response.status();
    app.metrics.responded(status.as_u16());
    if !app.settings.quiet && status.as_u16() >= 400 && status != StatusCode::SERVICE_UNAVAILABLE {
        let reason =
            response.extensions().get::<Reason>().map(|r| format!(": {}", printable(&r.0))).unwrap_or_default();
        crate::errln!("{method} {} {}{reason}", printable(&path), status.as_u16());
    }
    response
}

/// Fewest bytes per second a body must come at once its patience is used up.
const SLOWEST_BODY: f64 = 16.0 * 1024.0;

/// Receives the whole body, of at most `limit` bytes: a client that announces more is refused before it sends anything, and one
/// that stops sending, or sends a byte now and then, is let go.
async fn receive(request: Request, limit: usize, patience: Duration) -> Result<Request, ApiError> {
    let announced = request.headers().get(CONTENT_LENGTH).and_then(|n| n.to_str().ok()?.parse::<u64>().ok());
    let (head, body) = request.into_parts();
    let start = tokio::time::Instant::now();
    let mut frames = body.into_data_stream();
    if announced.is_some_and(|n| n > limit as u64) {
        return Err(too_large(frames, start + patience).await);
    }
    let mut received = Vec::new();
    loop {
        let deadline = start + patience + Duration::from_secs_f64(received.len() as f64 / SLOWEST_BODY);
        match tokio::time::timeout_at(deadline, frames.next()).await {
            Err(_) => return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the request body came too slowly")),
            Ok(None) => return Ok(Request::from_parts(head, Body::from(received))),
            Ok(Some(Err(_))) => return Err(ApiError::bad_request("the request body ended too early")),
            Ok(Some(Ok(frame))) if received.len() + frame.len() > limit => {
                return Err(too_large(frames, start + patience).await);
            }
            Ok(Some(Ok(frame))) => received.extend_from_slice(&frame),
        }
    }
}

/// Drops what else comes of a body before it is refused, for as long as it comes without a pause: a client that is still sending
/// would find the connection closed and never read the refusal.
async fn too_large(mut frames: BodyDataStream, deadline: tokio::time::Instant) -> ApiError {
    const PAUSE: Duration = Duration::from_millis(300);
    while tokio::time::Instant::now() < deadline {
        match tokio::time::timeout(PAUSE, frames.next()).await {
            Ok(Some(Ok(_))) => {}
            _ => break,
        }
    }
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "the request body is too large")
}

/// A text of a request as it may go to a terminal.
fn printable(path: &str) -> String {
    path.chars().take(200).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Turns refusals of handlers and of the framework into JSON of the dialect.
fn shape(mut response: Response, dialect: Dialect, path: &str) -> Response {
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        return error.render(dialect);
    }
    let status = response.status();
    let is_json = response.headers().get(CONTENT_TYPE).is_some_and(|t| t.as_bytes().starts_with(b"application/json"));
    if !status.is_client_error() && !status.is_server_error() || is_json {
        return response;
    }
    let message = match status.as_u16() {
        404 => format!("there is no {}", printable(path)),
        405 => format!("{} does not take this method", printable(path)),
        413 => "the request body is too large".to_owned(),
        _ => status.canonical_reason().unwrap_or("refused").to_owned(),
    };
    let allow = response.headers().get("allow").cloned();
    let mut shaped = ApiError::new(status, message).render(dialect);
    if let Some(allow) = allow {
        shaped.headers_mut().insert("allow", allow);
    }
    shaped
}

fn admit(app: &App, uri: &Uri, method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    let forbidden = |message: String| Err(ApiError::new(StatusCode::FORBIDDEN, message));
    let path = uri.path();
    let host = host_header(uri, headers)?;
    let name = host_name(host).ok_or_else(|| {
        ApiError::bad_request(format!("the Host header is not a name and a port: {}", printable(host)))
    })?;
    let named = |allowed: &String| allowed.eq_ignore_ascii_case(host) || allowed.eq_ignore_ascii_case(name);
    if app.settings.loopback && !is_local(name) && !app.settings.allowed_hosts.iter().any(named) {
        return forbidden(format!(
            "this server answers to localhost only, not to the name {} (--allowed-host)",
            printable(host)
        ));
    }
    if let Some(origin) = headers.get(ORIGIN) {
        let own =
            origin.to_str().ok().and_then(|o| o.split_once("://")).is_some_and(|(_, o)| o.eq_ignore_ascii_case(host));
        if !own && !cors_allows(app, origin) {
            return forbidden("requests from this web origin are not allowed (--cors-origin)".into());
        }
    }
    let open = OPEN_PATHS.contains(&path) || path.starts_with("/page/") || method == Method::OPTIONS;
    if !open && !key_matches(&app.settings.api_keys, headers) {
        return Err(ApiError::new(
            StatusCode::UNAUTHORIZED,
            "a valid API key is needed (Authorization: Bearer KEY, or x-api-key)",
        )
        .with_code("invalid_api_key"));
    }
    Ok(())
}

/// The one `Host` of a request. A proxy-style request line must name the same.
fn host_header<'a>(uri: &Uri, headers: &'a HeaderMap) -> Result<&'a str, ApiError> {
    let mut all = headers.get_all(HOST).iter();
    let host = all.next().and_then(|h| h.to_str().ok()).unwrap_or_default();
    if all.next().is_some() {
        return Err(ApiError::bad_request("the request has more than one Host header"));
    }
    if uri.authority().is_some_and(|a| !a.as_str().eq_ignore_ascii_case(host)) {
        return Err(ApiError::bad_request("the request line and the Host header name different hosts"));
    }
    if host.is_empty() { Err(ApiError::bad_request("the request has no Host header")) } else { Ok(host) }
}

/// The name in `name`, `name:port`, `[v6]` or `[v6]:port`; `None` for anything else.
fn host_name(host: &str) -> Option<&str> {
    let (name, rest) = match host.strip_prefix('[') {
        Some(v6) => {
            let (address, rest) = v6.split_once(']')?;
            address.parse::<std::net::Ipv6Addr>().ok()?;
            (address, rest)
        }
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let is_port = |port: &str| port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok();
    let port_fits = rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port);
    let is_name = |c: char| c.is_alphanumeric() || "-._:%".contains(c);
    (port_fits && !name.is_empty() && name.chars().all(is_name)).then_some(name)
}

fn is_local(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok_and(|a| a.is_loopback())
}

fn cors_allows(app: &App, origin: &HeaderValue) -> bool {
    app.settings
        .cors_origins
        .iter()
        .any(|o| o == "*" || o.trim_end_matches('/').as_bytes().eq_ignore_ascii_case(origin.as_bytes()))
}

fn preflight() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert("access-control-allow-methods", HeaderValue::from_static("GET, POST, OPTIONS"));
    headers.insert("access-control-allow-headers", HeaderValue::from_static(
        "authorization, content-type, x-api-key, anthropic-version, anthropic-beta, openai-beta, x-stainless-os, x-stainless-lang, x-stainless-arch, x-stainless-runtime, x-stainless-runtime-version, x-stainless-package-version, x-stainless-retry-count, x-stainless-timeout, anthropic-dangerous-direct-browser-access",
    ));
    headers.insert("access-control-max-age", HeaderValue::from_static("600"));
    response
}

/// Whether the request carries one of the keys. Hashes are compared, all of them, so that time tells neither the
/// length nor the beginning of a key.
fn key_matches(keys: &[String], headers: &HeaderMap) -> bool {
    if keys.is_empty() {
        return true;
    }
    let bearer = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|v| {
        let (scheme, key) = v.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    let Some(sent) = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes)) else { return false };
    let sent = Sha256::digest(sent);
    keys.iter()
        .fold(0u8, |found, key| found | Sha256::digest(key.as_bytes()).as_slice().ct_eq(sent.as_slice()).unwrap_u8())
        == 1
}

#[cfg(test)]
mod tests {
    use super::super::app::Settings;
    use super::*;

    fn admitted(settings: Settings, path: &str, headers: &[(&'static str, &str)]) -> Result<(), u16> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        if !headers.iter().any(|(name, _)| *name == "host") {
            map.insert(HOST, HeaderValue::from_static("localhost"));
        }
        admit(&App::new(settings), &path.parse().unwrap(), &Method::POST, &map).map_err(|e| e.status.as_u16())
    }

    #[test]
    fn a_loopback_server_answers_to_local_names_only() {
        let local = Settings::default;
        for host in ["localhost:8080", "127.0.0.1:1", "[::1]:80", "LOCALHOST"] {
            assert_eq!(admitted(local(), "/v1/models", &[("host", host)]), Ok(()), "{host}");
        }
        for host in ["evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1"] {
            assert_eq!(admitted(local(), "/v1/models", &[("host", host)]), Err(403), "{host}");
        }
        for host in [
            "",
            ":80",
            "localhost:",
            "localhost:80:80",
            "localhost:http",
            "localhost:99999",
            "localhost:+80",
            "[::1]evil.example",
            "[::1",
            "[localhost]",
            "user@localhost",
            "localhost/x",
        ] {
            assert_eq!(admitted(local(), "/v1/models", &[("host", host)]), Err(400), "{host}");
        }
        let twice = [("host", "localhost"), ("host", "localhost")];
        assert_eq!(admitted(local(), "/v1/models", &twice), Err(400));
        assert_eq!(admitted(local(), "http://evil.example/v1/models", &[("host", "localhost")]), Err(400));
        assert_eq!(admitted(local(), "http://localhost/v1/models", &[("host", "localhost")]), Ok(()));
        let named = Settings { allowed_hosts: vec!["box.lan".into()], ..Settings::default() };
        assert_eq!(admitted(named, "/v1/models", &[("host", "box.lan:8080")]), Ok(()));
        let open = Settings { loopback: false, ..Settings::default() };
        assert_eq!(admitted(open, "/v1/models", &[("host", "anything")]), Ok(()));
    }

    #[test]
    fn foreign_web_origins_are_refused_unless_named() {
        let own = [("host", "localhost:80"), ("origin", "http://localhost:80")];
        assert_eq!(admitted(Settings::default(), "/", &own), Ok(()));
        let foreign = [("host", "localhost:80"), ("origin", "https://evil.example")];
        assert_eq!(admitted(Settings::default(), "/", &foreign), Err(403));
        let sandboxed = [("host", "localhost:80"), ("origin", "null")];
        assert_eq!(admitted(Settings::default(), "/", &sandboxed), Err(403));
        let named = Settings { cors_origins: vec!["https://evil.example".into()], ..Settings::default() };
        assert_eq!(admitted(named, "/", &foreign), Ok(()));
    }

    #[test]
    fn any_of_the_keys_opens_and_nothing_else_does() {
        let keyed = || Settings { api_keys: vec!["one".into(), "two".into()], ..Settings::default() };
        let with = |k: &'static str, v: &str| admitted(keyed(), "/v1/models", &[(k, v)]);
        assert_eq!(with("authorization", "Bearer two"), Ok(()));
        assert_eq!(with("authorization", "bearer one"), Ok(()));
        assert_eq!(with("x-api-key", "one"), Ok(()));
        for bad in ["Bearer on", "Bearer one ", "Bearer ", "Basic one", "one", ""] {
            assert_eq!(with("authorization", bad), Err(401), "{bad}");
        }
        assert_eq!(admitted(keyed(), "/health", &[]), Ok(()));
        assert_eq!(admitted(keyed(), "/metrics", &[]), Err(401));
    }
}
