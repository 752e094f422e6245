//! Where pictures may come from, over real sockets where the network matters.

use super::*;
use axum::http::StatusCode;
use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

#[test]
fn data_urls_are_decoded_and_others_kept_as_references() {
    let data = PictureSource::from_url("u", "data:image/png;base64,aGk=").unwrap();
    assert_eq!(data, PictureSource::Data(Bytes::from_static(b"hi")));
    assert!(matches!(PictureSource::from_url("u", "HTTPS://x/y.png"), Ok(PictureSource::Remote(_))));
    assert!(matches!(PictureSource::from_url("u", "file:///a.png"), Ok(PictureSource::File(_))));
    for bad in ["data:image/png;base64", "data:image/png,abc", "data:;base64,@@", "ftp://x/y", ""] {
        assert!(PictureSource::from_url("u", bad).is_err(), "{bad}");
    }
}

#[test]
fn files_are_read_only_inside_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("pictures");
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(inside.join("a.png"), b"A").unwrap();
    std::fs::write(dir.path().join("secret"), b"S").unwrap();
    std::os::unix::fs::symlink(dir.path().join("secret"), inside.join("link.png")).unwrap();
    let policy = PicturePolicy { allow_remote: false, folder: Some(inside.clone()) };
    let load = |p: &str| PictureSource::File(p.into()).load("u", &policy);
    assert_eq!(load("a.png").unwrap(), "A");
    assert_eq!(load(inside.join("a.png").to_str().unwrap()).unwrap(), "A");
    for bad in ["../secret", "link.png", "/etc/passwd", ".", "absent.png"] {
        assert_eq!(load(bad).unwrap_err().status, 400, "{bad}");
    }
    assert!(PictureSource::File("a.png".into()).load("u", &PicturePolicy::default()).is_err());
}

#[test]
fn private_addresses_are_never_fetched_from() {
    for a in [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "192.168.0.1",
        "100.64.0.1",
        "::1",
        "fe80::1",
        "fc00::1",
        "::ffff:127.0.0.1",
        "2002:7f00:1::",
        "64:ff9b::7f00:1",
        "0.0.0.0",
    ] {
        assert!(!is_public(a.parse().unwrap()), "{a}");
    }
    for a in ["1.1.1.1", "2606:4700::1111"] {
        assert!(is_public(a.parse().unwrap()), "{a}");
    }
    let policy = PicturePolicy { allow_remote: true, folder: None };
    for url in ["http://127.0.0.1:9/x.png", "https://127.0.0.1:9/x.png", "https://[::1]:9/x.png"] {
        let error = PictureSource::Remote(url.into()).load("u", &policy).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (StatusCode::BAD_REQUEST, Some("u")), "{url}");
    }
}

/// Stands in for a public name: resolves `pictures.test` to a port of this machine, all else as the server does.
#[derive(Debug)]
struct TestNames(SocketAddr);

impl Resolver for TestNames {
    fn resolve(
        &self,
        uri: &ureq::http::Uri,
        config: &ureq::config::Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        if uri.host() != Some("pictures.test") {
            return PublicResolver.resolve(uri, config, timeout);
        }
        let mut addresses = self.empty();
        addresses.push(self.0);
        Ok(addresses)
    }
}

/// Answers one connection.
fn answer_once(talk: impl FnOnce(std::net::TcpStream) + Send + 'static) -> TestNames {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || talk(listener.accept().unwrap().0));
    TestNames(address)
}

fn refused(url: &str, names: TestNames) -> String {
    let error = fetch("u", url, names).unwrap_err();
    assert_eq!((error.status, error.param.as_deref()), (StatusCode::BAD_REQUEST, Some("u")));
    error.message
}

#[test]
fn a_redirect_to_a_private_address_is_not_followed() {
    for target in ["http://127.0.0.1:1/x", "https://127.0.0.1:1/x", "https://[::1]/x", "http://169.254.169.254/x"] {
        let names = answer_once(move |mut socket| {
            let _ = socket.read(&mut [0; 4096]);
            let reply = format!("HTTP/1.1 302 Found\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n");
            socket.write_all(reply.as_bytes()).unwrap();
        });
        let message = refused("http://pictures.test/x.png", names);
        assert!(message.contains("host not found"), "{target}: {message}");
    }
}

/// Self-signed, for `pictures.test`; used for nothing but this test.
const CERTIFICATE: &str = "MIIBoTCCAUegAwIBAgIUNBq/QHS1JGG9em/bQH72t6Qlw/swCgYIKoZIzj0EAwIwGDEWMBQGA1UEAwwNcGljdHVyZXMudGVzdDAgFw0yNjExMzAwOTI2MDJaGA8yMTI2MTEwNjA5MjYwMlowGDEWMBQGA1UEAwwNcGljdHVyZXMudGVzdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABPlw/Piqphcb2j8q2dJmazq08M8zJ5BVXfRbiwYLsHKUim6dl0bgB1bZIIHq45iKrRSdp708EUVPdbIao5VbFlWjbTBrMB0GA1UdDgQWBBTqOVBjWlJajCqRPrPRpTw3njD6dTAfBgNVHSMEGDAWgBTqOVBjWlJajCqRPrPRpTw3njD6dTAPBgNVHRMBAf8EBTADAQH/MBgGA1UdEQQRMA+CDXBpY3R1cmVzLnRlc3QwCgYIKoZIzj0EAwIDSAAwRQIgcgqK/1+Q0AAgeaRMHq5m+Uevdo6yFao08EjhEhvcoHYCIQDvpA9k1krEC5fkK/MOoe/3qbu0F8Cnf43pDCgLciVEFw==";
const KEY: &str = "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgkxPvHkJC2YGN08SuIEFsLeyTzKS6O9UmxvHN2+mAst+hRANCAAT5cPz4qqYXG9o/KtnSZms6tPDPMyeQVV30W4sGC7BylIpunZdG4AdW2SCB6uOYiq0Unae9PBFFT3WyGqOVWxZV";

#[test]
fn https_goes_through_tls_and_an_untrusted_certificate_is_named_as_the_reason() {
    let names = answer_once(|mut socket| {
        let key = rustls::pki_types::PrivatePkcs8KeyDer::from(STANDARD.decode(KEY).unwrap());
        let config = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![STANDARD.decode(CERTIFICATE).unwrap().into()], key.into())
            .unwrap();
        let mut tls = rustls::ServerConnection::new(Arc::new(config)).unwrap();
        // Ends with the client's alert.
        while tls.complete_io(&mut socket).is_ok() {}
    });
    let message = refused("https://pictures.test/x.png", names);
    assert!(message.contains("certificate"), "{message}");
}
