//! Messages as somebody might write them: any order of members, spaces, escapes, numbers that no double holds, and
//! members that nobody knows. Seeded, so a failure can be repeated.

pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn pick<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[usize::try_from(self.below(all.len() as u64)).unwrap()]
    }

    fn space(&mut self) -> &'static str {
        self.pick(&["", "", "", " ", "\n", "\t ", "\r\n"])
    }

    pub fn number(&mut self) -> String {
        self.pick(&[
            "0",
            "-0",
            "1.0",
            "1e400",
            "-1.50",
            "100000000000000000000000000000000000001",
            "0.1000",
            "1E-7",
            "42",
            "9007199254740993",
        ])
        .to_owned()
    }

    pub fn string(&mut self) -> String {
        let text = self.pick(&[
            r"plain",
            r"\u0061\u00e9",
            r"é世界😀",
            r#"q\"uote"#,
            r"a\/b\\c",
            r"\ud83d\ude00",
            "",
            r"line\nend",
            r"data: {",
        ]);
        format!("\"{text}{}\"", self.below(1_000))
    }

    pub fn value(&mut self, depth: u32) -> String {
        match self.below(if depth == 0 { 4 } else { 7 }) {
            0 => self.number(),
            1 | 2 => self.string(),
            3 => self.pick(&["true", "false", "null"]).to_owned(),
            4 => {
                let n = self.below(4);
                let items: Vec<String> = (0..n).map(|_| self.spaced(depth - 1)).collect();
                format!("[{}]", items.join(","))
            }
            _ => {
                let n = self.below(4);
                let members: Vec<(String, String)> =
                    (0..n).map(|i| (format!("\"k{i}\\u0061\""), self.spaced(depth - 1))).collect();
                self.object(members)
            }
        }
    }

    fn spaced(&mut self, depth: u32) -> String {
        let value = self.value(depth);
        format!("{}{value}{}", self.space(), self.space())
    }

    /// In any order.
    pub fn object(&mut self, mut members: Vec<(String, String)>) -> String {
        for i in (1..members.len()).rev() {
            members.swap(i, usize::try_from(self.below(i as u64 + 1)).unwrap());
        }
        let written: Vec<String> = members
            .into_iter()
            .map(|(name, value)| {
                format!("{}{name}{}:{}{value}{}", self.space(), self.space(), self.space(), self.space())
            })
            .collect();
        format!("{{{}}}", written.join(","))
    }

    /// A whole message of these members and some that nobody knows.
    pub fn message(&mut self, members: &[(&str, String)]) -> String {
        let mut all: Vec<(String, String)> =
            members.iter().map(|(name, value)| (format!("\"{name}\""), value.clone())).collect();
        all.push(("\"jsonrpc\"".into(), "\"2.0\"".into()));
        for i in 0..self.below(3) {
            all.push((format!("\"x-unknown{i}\""), self.value(2)));
        }
        self.object(all)
    }
}
