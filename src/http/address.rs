//! Which addresses may be dialled. Decided on the parsed address, never on a spelling, and by what is known to be
//! public rather than by what is known to be bad.
//!
//! Sources: the IANA IPv4 and IPv6 special-purpose address registries (RFC 6890), RFC 4291, RFC 6052 (NAT64),
//! RFC 8215 (local-use NAT64), RFC 3056 (6to4), RFC 4380 (Teredo), RFC 5214 (ISATAP).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Destination;

/// Whether an address may be dialled for `destination`; the word names the kind of address that is refused.
pub fn address_allowed(destination: Destination, ip: IpAddr) -> Result<(), &'static str> {
    match (destination, classify(ip)) {
        (Destination::Operator, _) | (_, Kind::Public) | (Destination::AgentLocal, Kind::Loopback) => Ok(()),
        (_, Kind::Loopback) => Err("address_loopback"),
        (_, Kind::Refused(word)) => Err(word),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Public,
    Loopback,
    Refused(&'static str),
}

fn classify(ip: IpAddr) -> Kind {
    match ip {
        IpAddr::V4(ip) => classify_v4(ip),
        IpAddr::V6(ip) => classify_v6(ip),
    }
}

fn classify_v4(ip: Ipv4Addr) -> Kind {
    match ip.octets() {
        [127, ..] => Kind::Loopback,
        [0, ..] => Kind::Refused("address_unspecified"),
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => Kind::Refused("address_private"),
        // Carrier-grade NAT; also where one cloud keeps its metadata service (100.100.100.200).
        [100, 64..=127, ..] => Kind::Refused("address_private"),
        [169, 254, ..] => Kind::Refused("address_link_local"),
        // A cloud's host agent, answering on a public-looking address inside each of its virtual machines.
        [168, 63, 129, 16] => Kind::Refused("address_metadata"),
        [192, 0, 0, _] => Kind::Refused("address_reserved"),
        [192, 0, 2, _] | [198, 51, 100, _] | [203, 0, 113, _] => Kind::Refused("address_documentation"),
        // The former 6to4 relay anycast: an inner address could hide behind the relay.
        [192, 88, 99, _] => Kind::Refused("address_transition"),
        [198, 18..=19, ..] => Kind::Refused("address_benchmarking"),
        [224..=239, ..] => Kind::Refused("address_multicast"),
        [240..=255, ..] => Kind::Refused("address_reserved"),
        _ => Kind::Public,
    }
}

fn classify_v6(ip: Ipv6Addr) -> Kind {
    let s = ip.segments();
    let inner = Ipv4Addr::from((u32::from(s[6]) << 16) | u32::from(s[7]));
    match s {
        [0, 0, 0, 0, 0, 0, 0, 1] => Kind::Loopback,
        [0, 0, 0, 0, 0, 0, 0, 0] => Kind::Refused("address_unspecified"),
        // Mapped: the system dials the IPv4 address itself.
        [0, 0, 0, 0, 0, 0xffff, _, _] => classify_v4(inner),
        // NAT64: the translator dials the IPv4 address. Public ones must work on clusters that have IPv6 only; its
        // loopback would be the translator's, which nobody means.
        [0x64, 0xff9b, 0, 0, 0, 0, _, _] => match classify_v4(inner) {
            Kind::Loopback => Kind::Refused("address_transition"),
            kind => kind,
        },
        [0xfe80..=0xfebf, ..] => Kind::Refused("address_link_local"),
        [0xfec0..=0xfeff, ..] | [0xfc00..=0xfdff, ..] => Kind::Refused("address_private"),
        [0xff00..=0xffff, ..] => Kind::Refused("address_multicast"),
        // Outside 2000::/3 nothing is globally routed: compatible and translated IPv4, local-use NAT64, discard, SRv6.
        [0x0000..=0x1fff, ..] | [0x4000..=0xffff, ..] => Kind::Refused("address_reserved"),
        // IETF protocol assignments: Teredo, benchmarking, ORCHID and others.
        [0x2001, 0x0000..=0x01ff, ..] => Kind::Refused("address_transition"),
        [0x2002, ..] => Kind::Refused("address_transition"),
        [0x2001, 0x0db8, ..] | [0x3fff, 0x0000..=0x0fff, ..] => Kind::Refused("address_documentation"),
        // ISATAP: the last four bytes are the IPv4 address that the packet is tunnelled to.
        [_, _, _, _, 0x0000 | 0x0200, 0x5efe, _, _] => Kind::Refused("address_transition"),
        _ => Kind::Public,
    }
}

#[cfg(test)]
mod tests {
    use super::super::connect::Origin;
    use super::*;

    /// (host as it is written in a URL, what an agent's destination and a local one are told; "" is allowed)
    const TABLE: &[(&str, &str, &str)] = &[
        // public
        ("93.184.216.34", "", ""),
        ("1.1.1.1", "", ""),
        ("9.255.255.255", "", ""),
        ("11.0.0.0", "", ""),
        ("100.63.255.255", "", ""),
        ("100.128.0.0", "", ""),
        ("126.255.255.255", "", ""),
        ("128.0.0.0", "", ""),
        ("168.63.129.17", "", ""),
        ("169.253.255.255", "", ""),
        ("172.15.255.255", "", ""),
        ("172.32.0.0", "", ""),
        ("192.0.1.1", "", ""),
        ("198.17.255.255", "", ""),
        ("198.20.0.0", "", ""),
        ("223.255.255.255", "", ""),
        ("[2606:4700:4700::1111]", "", ""),
        ("[2a00:1450:4001:82a::200e]", "", ""),
        ("[2001:4860:4860::8888]", "", ""),
        ("[2001:200::1]", "", ""),
        ("[64:ff9b::808:808]", "", ""),
        ("[64:ff9b::8.8.8.8]", "", ""),
        ("[::ffff:8.8.8.8]", "", ""),
        // IPv4, every special-purpose range at its edges
        ("0.0.0.0", "address_unspecified", "address_unspecified"),
        ("0.255.255.255", "address_unspecified", "address_unspecified"),
        ("10.0.0.0", "address_private", "address_private"),
        ("10.255.255.255", "address_private", "address_private"),
        ("100.64.0.0", "address_private", "address_private"),
        ("100.100.100.200", "address_private", "address_private"),
        ("100.127.255.255", "address_private", "address_private"),
        ("127.0.0.1", "address_loopback", ""),
        ("127.255.255.255", "address_loopback", ""),
        ("169.254.0.0", "address_link_local", "address_link_local"),
        ("169.254.169.254", "address_link_local", "address_link_local"),
        ("169.254.255.255", "address_link_local", "address_link_local"),
        ("168.63.129.16", "address_metadata", "address_metadata"),
        ("172.16.0.0", "address_private", "address_private"),
        ("172.31.255.255", "address_private", "address_private"),
        ("192.0.0.0", "address_reserved", "address_reserved"),
        ("192.0.0.192", "address_reserved", "address_reserved"),
        ("192.0.2.1", "address_documentation", "address_documentation"),
        ("192.88.99.1", "address_transition", "address_transition"),
        ("192.168.0.0", "address_private", "address_private"),
        ("192.168.255.255", "address_private", "address_private"),
        ("198.18.0.0", "address_benchmarking", "address_benchmarking"),
        ("198.19.255.255", "address_benchmarking", "address_benchmarking"),
        ("198.51.100.7", "address_documentation", "address_documentation"),
        ("203.0.113.7", "address_documentation", "address_documentation"),
        ("224.0.0.1", "address_multicast", "address_multicast"),
        ("239.255.255.255", "address_multicast", "address_multicast"),
        ("240.0.0.1", "address_reserved", "address_reserved"),
        ("255.255.255.255", "address_reserved", "address_reserved"),
        // IPv4 in other spellings
        ("0", "address_unspecified", "address_unspecified"),
        ("0x7f.1", "address_loopback", ""),
        ("0x7f000001", "address_loopback", ""),
        ("2130706433", "address_loopback", ""),
        ("0177.0.0.1", "address_loopback", ""),
        ("017700000001", "address_loopback", ""),
        ("127.1", "address_loopback", ""),
        ("127.0.1", "address_loopback", ""),
        ("127.0.0.1.", "address_loopback", ""),
        ("１２７.0.0.1", "address_loopback", ""),
        ("①②⑦.0.0.1", "address_loopback", ""),
        ("127。0。0。1", "address_loopback", ""),
        ("%31%32%37.0.0.1", "address_loopback", ""),
        ("2852039166", "address_link_local", "address_link_local"),
        ("0xa9fea9fe", "address_link_local", "address_link_local"),
        ("0251.0376.0251.0376", "address_link_local", "address_link_local"),
        ("①⑥⑨.②⑤④.①⑥⑨.②⑤④", "address_link_local", "address_link_local"),
        ("10.1", "address_private", "address_private"),
        // IPv6
        ("[::]", "address_unspecified", "address_unspecified"),
        ("[::1]", "address_loopback", ""),
        ("[0:0:0:0:0:0:0:1]", "address_loopback", ""),
        ("[fe80::1]", "address_link_local", "address_link_local"),
        ("[febf:ffff::1]", "address_link_local", "address_link_local"),
        ("[fec0::1]", "address_private", "address_private"),
        ("[fc00::1]", "address_private", "address_private"),
        ("[fd00:ec2::254]", "address_private", "address_private"),
        ("[fdff::1]", "address_private", "address_private"),
        ("[ff02::1]", "address_multicast", "address_multicast"),
        ("[100::1]", "address_reserved", "address_reserved"),
        ("[100:0:0:1::1]", "address_reserved", "address_reserved"),
        ("[5f00::1]", "address_reserved", "address_reserved"),
        ("[4000::1]", "address_reserved", "address_reserved"),
        ("[1fff::1]", "address_reserved", "address_reserved"),
        ("[2001:db8::1]", "address_documentation", "address_documentation"),
        ("[3fff::1]", "address_documentation", "address_documentation"),
        ("[3fff:fff::1]", "address_documentation", "address_documentation"),
        ("[2001:2::1]", "address_transition", "address_transition"),
        ("[2001:10::1]", "address_transition", "address_transition"),
        ("[2001:20::1]", "address_transition", "address_transition"),
        // IPv4 inside IPv6
        ("[::ffff:127.0.0.1]", "address_loopback", ""),
        ("[::ffff:7f00:1]", "address_loopback", ""),
        ("[::ffff:169.254.169.254]", "address_link_local", "address_link_local"),
        ("[::ffff:a9fe:a9fe]", "address_link_local", "address_link_local"),
        ("[0:0:0:0:0:ffff:10.0.0.1]", "address_private", "address_private"),
        ("[::169.254.169.254]", "address_reserved", "address_reserved"),
        ("[::127.0.0.1]", "address_reserved", "address_reserved"),
        ("[::8.8.8.8]", "address_reserved", "address_reserved"),
        ("[::ffff:0:7f00:1]", "address_reserved", "address_reserved"),
        ("[64:ff9b::a9fe:a9fe]", "address_link_local", "address_link_local"),
        ("[64:ff9b::10.0.0.1]", "address_private", "address_private"),
        ("[64:ff9b::127.0.0.1]", "address_transition", "address_transition"),
        ("[64:ff9b:1::a9fe:a9fe]", "address_reserved", "address_reserved"),
        ("[64:ff9b:1::808:808]", "address_reserved", "address_reserved"),
        ("[2002:7f00:1::]", "address_transition", "address_transition"),
        ("[2002:a9fe:a9fe::1]", "address_transition", "address_transition"),
        ("[2001:0:a9fe:a9fe::1]", "address_transition", "address_transition"),
        ("[2606:4700::5efe:127.0.0.1]", "address_transition", "address_transition"),
        ("[2606:4700::200:5efe:a9fe:a9fe]", "address_transition", "address_transition"),
        ("[fe80::5efe:10.0.0.1]", "address_link_local", "address_link_local"),
    ];

    #[test]
    fn every_range_and_spelling_is_decided_on_the_address_that_it_means() {
        for (host, agent, local) in TABLE {
            // As an endpoint's URL: parsed first, as the endpoint rules do, then taken to the dialer.
            let url = url::Url::parse(&format!("https://{host}/mcp")).unwrap_or_else(|e| panic!("{host}: {e}"));
            let uri: http::Uri = url.as_str().parse().unwrap();
            for (destination, expected) in [(Destination::Agent, agent), (Destination::AgentLocal, local)] {
                let word = match Origin::of(&uri, destination) {
                    Ok(origin) => {
                        assert!(origin.ip.is_some(), "{host} is an address");
                        ""
                    }
                    Err(super::super::HttpError::Refused(word)) => word,
                    Err(other) => panic!("{host}: {other}"),
                };
                assert_eq!(word, *expected, "{host} for {destination:?}");
            }
            assert!(Origin::of(&uri, Destination::Operator).is_ok(), "{host} may be configured");
        }
    }

    #[test]
    fn zone_identifiers_and_broken_spellings_are_no_hosts() {
        for host in ["[fe80::1%25eth0]", "[fe80::1%eth0]", "[::1", "256.0.0.1", "1.2.3.4.5", "0x100000000", "[::1]x"] {
            assert!(url::Url::parse(&format!("https://{host}/")).is_err(), "{host}");
        }
    }
}
