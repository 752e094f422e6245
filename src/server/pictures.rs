//! Where the pictures of a request come from: data URLs, base64, files under `--image-dir`, and http(s) where allowed.

use super::error::ApiError;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE};
use bytes::Bytes;
use std::io::Read;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

/// Largest picture file read from a URL or the picture folder, in bytes.
const MAX_PICTURE_BYTES: u64 = 32 << 20;
/// Longest time for fetching one remote picture.
const FETCH_TIMEOUT: Duration = Duration::from_secs(15);

/// What the server's command line allows besides data in the request.
#[derive(Clone, Debug, Default)]
pub struct PicturePolicy {
    /// Fetch http(s) URLs.
    pub allow_remote: bool,
    /// Read `file:` URLs and plain paths below this folder.
    pub folder: Option<PathBuf>,
}

/// A picture that a request names.
#[derive(Clone, Debug, PartialEq)]
pub enum PictureSource {
    /// The bytes of the file.
    Data(Bytes),
    /// An http or https URL.
    Remote(String),
    /// A path, to be looked up in the picture folder.
    File(PathBuf),
}

impl PictureSource {
    /// Reads a `data:`, `http(s):` or `file:` URL, or a plain path. `path` names the field in errors.
    pub fn from_url(path: &str, url: &str) -> Result<PictureSource, ApiError> {
        if let Some(rest) = strip_scheme(url, "data:") {
            let Some((kind, data)) = rest.split_once(',') else {
                return Err(ApiError::field(path, "a data URL needs a comma before its data"));
            };
            if !kind.to_ascii_lowercase().ends_with(";base64") {
                return Err(ApiError::field(path, "expected a data URL with ;base64"));
            }
            return PictureSource::from_base64(path, data);
        }
        if strip_scheme(url, "http://").is_some() || strip_scheme(url, "https://").is_some() {
            return Ok(PictureSource::Remote(url.to_owned()));
        }
        let file = strip_scheme(url, "file://").unwrap_or(url);
        if file.is_empty() || file.contains("://") {
            return Err(ApiError::field(path, "expected a data:, http:, https: or file: URL"));
        }
        Ok(PictureSource::File(PathBuf::from(file)))
    }

    /// Reads base64 text.
    pub fn from_base64(path: &str, data: &str) -> Result<PictureSource, ApiError> {
        let clean: String = data.chars().filter(|c| !c.is_ascii_whitespace()).collect();
        let bytes = STANDARD
            .decode(&clean)
            .or_else(|e| STANDARD_NO_PAD.decode(&clean).map_err(|_| e))
            .or_else(|e| URL_SAFE.decode(&clean).map_err(|_| e))
            .map_err(|e| ApiError::field(path, format!("not valid base64: {e}")))?;
        Ok(PictureSource::Data(bytes.into()))
    }

    /// Gets the bytes of the picture file. Blocking.
    pub fn load(&self, path: &str, policy: &PicturePolicy) -> Result<Bytes, ApiError> {
        match self {
            PictureSource::Data(bytes) => Ok(bytes.clone()),
            PictureSource::File(file) => load_file(path, file, policy),
            PictureSource::Remote(_) if !policy.allow_remote => Err(ApiError::field(
                path,
                "this server does not fetch pictures (start it with --allow-remote-images); send a data: URL",
            )),
            PictureSource::Remote(url) => fetch(path, url, PublicResolver),
        }
    }
}

fn strip_scheme<'a>(url: &'a str, scheme: &str) -> Option<&'a str> {
    let head = url.get(..scheme.len())?;
    head.eq_ignore_ascii_case(scheme).then(|| &url[scheme.len()..])
}

fn load_file(path: &str, file: &Path, policy: &PicturePolicy) -> Result<Bytes, ApiError> {
    let Some(folder) = &policy.folder else {
        return Err(ApiError::field(
            path,
            "this server does not read picture files (start it with --image-dir); send a data: URL",
        ));
    };
    // One message for "outside" and "absent", so that a client cannot learn which files exist.
    let refused = || ApiError::field(path, format!("no picture {} in the picture folder", file.display()));
    let relative: PathBuf = match file.strip_prefix(folder) {
        Ok(inside) => inside.to_owned(),
        Err(_) if file.is_absolute() => return Err(refused()),
        Err(_) => file.to_owned(),
    };
    if !relative.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir)) {
        return Err(refused());
    }
    // Links inside the folder must not lead out of it either.
    let root = folder.canonicalize().map_err(|_| refused())?;
    let full = root.join(relative).canonicalize().map_err(|_| refused())?;
    if !full.starts_with(&root) || !full.is_file() {
        return Err(refused());
    }
    let mut bytes = Vec::new();
    let reader = std::fs::File::open(&full).map_err(|_| refused())?;
    reader.take(MAX_PICTURE_BYTES + 1).read_to_end(&mut bytes).map_err(|_| refused())?;
    limit(path, bytes)
}

fn limit(path: &str, bytes: Vec<u8>) -> Result<Bytes, ApiError> {
    if bytes.len() as u64 > MAX_PICTURE_BYTES {
        return Err(ApiError::field(path, format!("the picture is larger than {} MiB", MAX_PICTURE_BYTES >> 20)));
    }
    Ok(bytes.into())
}

/// Whether an address may be reached on behalf of a client: not this machine, not its private networks.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, ..] = v4.octets();
            !(v4.is_private()
                || v4.is_loopback()
                || v4.is_link_local()
                || v4.is_broadcast()
                || v4.is_multicast()
                || v4.is_documentation()
                || a == 0
                || a >= 240
                || (a == 100 && (64..128).contains(&b))
                || (a == 198 && (18..20).contains(&b))
                || (a == 192 && b == 0 && v4.octets()[2] == 0))
        }
        IpAddr::V6(v6) => {
            if let Some(v4) = v6.to_ipv4_mapped() {
                return is_public(IpAddr::V4(v4));
            }
            let [a, b, ..] = v6.segments();
            // Global unicast only, without documentation, 6to4, Teredo and NAT64 (which can embed private addresses).
            (a & 0xe000) == 0x2000 && a != 0x2002 && !(a == 0x2001 && (b == 0 || b == 0x0db8))
        }
    }
}

/// Resolves names to public addresses only, at connect time, so that a name cannot be re-pointed after a check.
#[derive(Debug)]
struct PublicResolver;

impl ureq::unversioned::resolver::Resolver for PublicResolver {
    fn resolve(
        &self,
        uri: &ureq::http::Uri,
        _config: &ureq::config::Config,
        _timeout: ureq::unversioned::transport::NextTimeout,
    ) -> Result<ureq::unversioned::resolver::ResolvedSocketAddrs, ureq::Error> {
        let host = uri.host().ok_or(ureq::Error::HostNotFound)?.trim_matches(['[', ']']);
        let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
        let found: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
        let mut addresses = self.empty();
        for address in found.into_iter().filter(|a| is_public(a.ip())).take(8) {
            addresses.push(address);
        }
        if addresses.is_empty() { Err(ureq::Error::HostNotFound) } else { Ok(addresses) }
    }
}

/// Every hop of a redirect goes through `resolver` again; certificates are checked against the roots browsers trust.
fn fetch(path: &str, url: &str, resolver: impl ureq::unversioned::resolver::Resolver) -> Result<Bytes, ApiError> {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(FETCH_TIMEOUT))
        .max_redirects(3)
        .proxy(None)
        .user_agent(concat!("strata/", env!("CARGO_PKG_VERSION")))
        .build();
    let connector = ureq::unversioned::transport::DefaultConnector::default();
    let agent = ureq::Agent::with_parts(config, connector, resolver);
    let failed = |e: ureq::Error| ApiError::field(path, format!("the picture could not be fetched: {e}"));
    let mut response = agent.get(url).call().map_err(failed)?;
    let bytes = response.body_mut().with_config().limit(MAX_PICTURE_BYTES).read_to_vec().map_err(failed)?;
    limit(path, bytes)
}

#[cfg(test)]
mod tests;
