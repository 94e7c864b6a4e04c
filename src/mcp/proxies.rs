//! Who made a request, where proxies of the operator's stand between: a load balancer, an ingress. What a proxy says of
//! itself is believed only of those that are named, because anybody can say it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::HeaderMap;
use ipnet::IpNet;

const FORWARDED: &str = "x-forwarded-for";
/// Proxies in a row.
const MAX_HOPS: usize = 16;

/// The networks whose `X-Forwarded-For` is believed (`http.trusted_proxies`); none as a rule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Proxies(Arc<[IpNet]>);

impl Proxies {
    /// `Err`: why this text is none of them.
    pub fn parse(texts: &[String]) -> Result<Proxies, (usize, String)> {
        let nets = texts.iter().enumerate().map(|(at, text)| {
            let net = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
            match net {
                Ok(net) if net.prefix_len() == 0 => {
                    Err((at, format!("{text:?} is everybody: name the proxies' network")))
                }
                Ok(net) => Ok(net.trunc()),
                Err(_) => Err((at, format!("{text:?} is no address or network: write one such as 10.0.0.0/8"))),
            }
        });
        nets.collect::<Result<Vec<_>, _>>().map(|nets| Proxies(nets.into()))
    }

    fn trusts(&self, ip: IpAddr) -> bool {
        self.0.iter().any(|net| net.contains(&ip.to_canonical()))
    }

    /// Each proxy appends whom it was asked by, so the list is read from its end, as far as it was written by proxies
    /// that are trusted.
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut client = peer;
        let lines = headers.get_all(FORWARDED).iter().rev().map(|line| line.to_str().unwrap_or_default());
        for said in lines.flat_map(|line| line.rsplit(',')).take(MAX_HOPS) {
            if !self.trusts(client) {
                break;
            }
            let Some(ip) = address(said.trim()) else { break };
            client = ip;
        }
        client
    }
}

/// Some write the port too.
fn address(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    bare.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(proxies: &[&str], peer: &str, lines: &[&str]) -> String {
        let texts: Vec<String> = proxies.iter().map(|text| (*text).to_owned()).collect();
        let mut headers = HeaderMap::new();
        lines.iter().for_each(|line| {
            headers.append(FORWARDED, line.parse().unwrap());
        });
        Proxies::parse(&texts).unwrap().client(peer.parse().unwrap(), &headers).to_string()
    }

    #[test]
    fn a_client_is_who_the_last_trusted_proxy_was_asked_by() {
        let ours = ["10.0.0.0/8", "2001:db8::/32", "192.0.2.7"];
        for (peer, lines, expected) in [
            ("10.1.2.3", &["203.0.113.9"][..], "203.0.113.9"),
            ("10.1.2.3", &["203.0.113.9, 10.9.9.9"], "203.0.113.9"),
            ("10.1.2.3", &["203.0.113.9", "10.9.9.9"], "203.0.113.9"),
            ("::ffff:10.1.2.3", &["203.0.113.9:4711"], "203.0.113.9"),
            ("2001:db8::1", &["[2001:db9::5]:443"], "2001:db9::5"),
            ("192.0.2.7", &["[2001:db9::5]"], "2001:db9::5"),
            // What the client wrote itself stands before what our proxy appended.
            ("10.1.2.3", &["198.51.100.1, 203.0.113.9"], "203.0.113.9"),
            ("10.1.2.3", &["10.0.0.1, 203.0.113.9"], "203.0.113.9"),
            // Nobody whom we trust said it.
            ("203.0.113.9", &["198.51.100.1"], "203.0.113.9"),
            ("192.0.2.8", &["198.51.100.1"], "192.0.2.8"),
            // Nobody said anything that could be read.
            ("10.1.2.3", &[], "10.1.2.3"),
            ("10.1.2.3", &["unknown"], "10.1.2.3"),
            ("10.1.2.3", &["198.51.100.1, unknown, 10.9.9.9"], "10.9.9.9"),
        ] {
            assert_eq!(client(&ours, peer, lines), expected, "{peer} {lines:?}");
        }
        assert_eq!(client(&[], "10.1.2.3", &["203.0.113.9"]), "10.1.2.3", "nobody is trusted unless named");
        let endless = vec!["10.0.0.1"; 4_000].join(",");
        assert_eq!(client(&ours, "10.1.2.3", &[&endless]), "10.0.0.1");
    }

    #[test]
    fn everybody_is_no_proxy() {
        for (text, word) in
            [("0.0.0.0/0", "everybody"), ("::/0", "everybody"), ("10.0.0.0/33", "10.0.0.0/8"), ("lb", "lb")]
        {
            let (at, why) = Proxies::parse(&["10.0.0.1".to_owned(), text.to_owned()]).unwrap_err();
            assert!(at == 1 && why.contains(word), "{why}");
        }
    }
}
