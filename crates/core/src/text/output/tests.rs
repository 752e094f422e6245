//! Every case is read whole, split in two at every byte, and byte by byte: the result is the same.

use serde_json::json;

use super::*;

fn tools() -> ToolSchemas {
    ToolSchemas::new(&json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}, "factor": {"type": "number"},
            "zip": {"type": ["string", "null"]}, "code": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "where": {"$ref": "#/$defs/point"}, "tags": {"type": "array", "items": {"type": "string"}}, "any": {},
            "unit": {"enum": ["C", "F"]}}, "$defs": {"point": {"type": "object"}}}}},
        {"name": "write_file", "input_schema": {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}}},
    ]))
}

struct Case {
    name: &'static str,
    in_reasoning: bool,
    keep_tags: bool,
    tools: bool,
    text: &'static str,
    reasoning: &'static str,
    content: &'static str,
    /// (name, arguments, complete)
    calls: &'static [(&'static str, &'static str, bool)],
}

const PLAIN: Case = Case {
    name: "",
    in_reasoning: false,
    keep_tags: false,
    tools: true,
    text: "",
    reasoning: "",
    content: "",
    calls: &[],
};

const CASES: &[Case] = &[
    Case { name: "nothing", ..PLAIN },
    Case { name: "plain text", text: " Hello,\nworld <b>!</b> \n", content: " Hello,\nworld <b>!</b> \n", ..PLAIN },
    Case {
        name: "reasoning",
        in_reasoning: true,
        text: "\nI think\n\nhard. \n</think>\n\nYes.\n",
        reasoning: "I think\n\nhard.",
        content: "Yes.\n",
        ..PLAIN
    },
    Case {
        name: "reasoning opened by the answer",
        text: "\n<think>\nHm.\n</think>\n\nYes.",
        reasoning: "Hm.",
        content: "Yes.",
        ..PLAIN
    },
    Case {
        name: "reasoning opened twice",
        in_reasoning: true,
        text: "<think>\nHm.</think>Yes.",
        reasoning: "Hm.",
        content: "Yes.",
        ..PLAIN
    },
    Case {
        name: "reasoning with its tags",
        in_reasoning: true,
        keep_tags: true,
        text: "Hm. \n</think>\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        reasoning: "<think>\nHm. \n</think>",
        calls: &[("now", "{}", true)],
        ..PLAIN
    },
    Case {
        name: "reasoning with its tags, opened by the answer",
        keep_tags: true,
        tools: false,
        text: "\n<think>\nHm.</think>\n\nYes. </think>",
        reasoning: "\n<think>\nHm.</think>",
        content: "\n\nYes. </think>",
        ..PLAIN
    },
    Case {
        name: "reasoning with its tags, cut off",
        in_reasoning: true,
        keep_tags: true,
        text: "so </thi",
        reasoning: "<think>\nso </thi",
        ..PLAIN
    },
    Case { name: "empty reasoning", in_reasoning: true, text: "\n</think>\n\nYes.", content: "Yes.", ..PLAIN },
    Case {
        name: "reasoning cut off",
        in_reasoning: true,
        text: "I was about to </thi",
        reasoning: "I was about to </thi",
        ..PLAIN
    },
    Case { name: "reasoning cut off after a blank", in_reasoning: true, text: "so\n\n", reasoning: "so", ..PLAIN },
    Case {
        name: "a tag in the text",
        text: "Use <think> and </think> so.",
        content: "Use <think> and </think> so.",
        ..PLAIN
    },
    Case {
        name: "characters of several bytes",
        in_reasoning: true,
        text: "é中🙂</think>é中🙂 <tool",
        reasoning: "é中🙂",
        content: "é中🙂 <tool",
        ..PLAIN
    },
    Case {
        name: "no tools on offer",
        tools: false,
        text: "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        content: "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        ..PLAIN
    },
    Case {
        name: "one call",
        text: "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        calls: &[("get_weather", r#"{"city":"Paris","days":3}"#, true)],
        ..PLAIN
    },
    Case {
        name: "no parameters",
        text: "<tool_call>\n<function=now>\n</function>\n</tool_call>\n",
        calls: &[("now", "{}", true)],
        ..PLAIN
    },
    Case {
        name: "reasoning, text and a call",
        in_reasoning: true,
        text: "Need data.\n</think>\n\nLet me look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        reasoning: "Need data.",
        content: "Let me look.",
        calls: &[("get_weather", r#"{"city":"Rome"}"#, true)],
        ..PLAIN
    },
    Case {
        name: "parallel calls",
        text: "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n",
        calls: &[("now", "{}", true), ("get_weather", r#"{"city":"Oslo"}"#, true)],
        ..PLAIN
    },
    Case {
        name: "two functions in one call",
        text: "<tool_call>\n<function=now>\n</function>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        calls: &[("now", "{}", true), ("get_weather", r#"{"city":"Oslo"}"#, true)],
        ..PLAIN
    },
    Case {
        name: "text after a call",
        text: "<tool_call>\n<function=now>\n</function>\n</tool_call>\n\nDone.",
        content: "Done.",
        calls: &[("now", "{}", true)],
        ..PLAIN
    },
    Case {
        name: "typed values",
        text: "<tool_call>\n<function=get_weather>\n<parameter=city>\n007\n</parameter>\n<parameter=zip>\n01234\n</parameter>\n<parameter=code>\n12\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=factor>\n-1.50e3\n</parameter>\n<parameter=days>\n12345678901234567890123\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
        calls: &[(
            "get_weather",
            r#"{"city":"007","zip":"01234","code":12,"exact":true,"factor":-1.50e3,"days":12345678901234567890123,"unit":"C"}"#,
            true,
        )],
        ..PLAIN
    },
    Case {
        name: "null and strings that are not",
        text: "<tool_call>\n<function=get_weather>\n<parameter=zip>\nnull\n</parameter>\n<parameter=city>\nnull\n</parameter>\n<parameter=code>\n012\n</parameter>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
        calls: &[("get_weather", r#"{"zip":null,"city":"null","code":"012","days":"many"}"#, true)],
        ..PLAIN
    },
    Case {
        name: "nested JSON",
        text: "<tool_call>\n<function=get_weather>\n<parameter=where>\n{\n  \"a\": {\"b\": [1, \"</parameter>\", null]}\n}\n</parameter>\n<parameter=tags>\n[\"x\", \"y\"]\n</parameter>\n<parameter=any>\n[1]\n</parameter>\n</function>\n</tool_call>",
        calls: &[(
            "get_weather",
            "{\"where\":{\n  \"a\": {\"b\": [1, \"</parameter>\", null]}\n},\"tags\":[\"x\", \"y\"],\"any\":[1]}",
            true,
        )],
        ..PLAIN
    },
    Case {
        name: "unknown function and parameter",
        text: "<tool_call>\n<function=other>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>",
        calls: &[("other", r#"{"n":"12"}"#, true)],
        ..PLAIN
    },
    Case {
        name: "tags inside an argument",
        text: "<tool_call>\n<function=write_file>\n<parameter=text>\n<parameter=x>\n1\n</parameter>\n</function> </tool_call>\n</parameter> <tool_call> </parameter>\n</function>!\n</parameter>\n</function>\n</tool_call>",
        calls: &[("write_file", r#"{"text":"<parameter=x>\n1"}"#, true)],
        content: "</parameter> <tool_call> </parameter>\n</function>!\n</parameter>\n</function>\n</tool_call>",
        ..PLAIN
    },
    Case {
        name: "closing tags inside an argument",
        text: "<tool_call>\n<function=write_file>\n<parameter=text>\na </parameter> b\n</parameter>\nc </function> </tool_call>\n</parameter> <parameter=\nd\n</parameter>\n</function> e <think>\n</parameter>\n</function>\n</tool_call>",
        calls: &[(
            "write_file",
            r#"{"text":"a </parameter> b\n</parameter>\nc </function> </tool_call>\n</parameter> <parameter=\nd\n</parameter>\n</function> e <think>"}"#,
            true,
        )],
        ..PLAIN
    },
    Case {
        name: "blanks and lines in an argument are kept",
        text: "<tool_call>\n<function=write_file>\n<parameter=text>\n\n  two\r\n\n\n</parameter>\n<parameter=path>\n\"q\\\"\t\u{1}\n</parameter>\n</function>\n</tool_call>",
        calls: &[("write_file", r#"{"text":"\n  two\r\n\n","path":"\"q\\\"\t\u0001"}"#, true)],
        ..PLAIN
    },
    Case {
        name: "written on one line",
        text: "<tool_call><function=write_file><parameter=path>a</parameter><parameter=text></parameter></function></tool_call>",
        calls: &[("write_file", r#"{"path":"a","text":""}"#, true)],
        ..PLAIN
    },
    Case {
        name: "a function not closed",
        text: "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n</tool_call>",
        calls: &[("write_file", r#"{"path":"a"}"#, true)],
        ..PLAIN
    },
    Case {
        name: "a call not closed",
        text: "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_",
        calls: &[("write_file", r#"{"path":"a"}"#, true)],
        ..PLAIN
    },
    Case {
        name: "cut off in a string",
        text: "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n<parameter=text>\nonce upon\n</para",
        calls: &[("write_file", r#"{"path":"a","text":"once upon"#, false)],
        ..PLAIN
    },
    Case {
        name: "cut off in a number",
        text: "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n12",
        calls: &[("get_weather", r#"{"city":"Rome""#, false)],
        ..PLAIN
    },
    Case {
        name: "cut off in a parameter's name",
        text: "<tool_call>\n<function=get_weather>\n<parameter=ci",
        calls: &[("get_weather", "", false)],
        ..PLAIN
    },
    Case {
        name: "cut off in the function's name",
        text: "So: <tool_call>\n<function=get_we",
        content: "So: <tool_call>\n<function=get_we",
        ..PLAIN
    },
    Case {
        name: "a call that is none",
        text: "The tag <tool_call> opens a call.",
        content: "The tag <tool_call> opens a call.",
        ..PLAIN
    },
    Case {
        name: "noise before a parameter",
        text: "<tool_call>\n<function=write_file>\nnoise <b>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
        calls: &[("write_file", r#"{"path":"a"}"#, true)],
        ..PLAIN
    },
];

fn read<'t>(case: &Case, parts: impl IntoIterator<Item = &'t str>) -> Output {
    let mode = OutputMode {
        starts_in_reasoning: case.in_reasoning,
        tools: case.tools.then(tools),
        keep_reasoning_tags: case.keep_tags,
        id_prefix: "a1".into(),
    };
    let mut parser = OutputParser::new(mode);
    let mut output = Output::default();
    for part in parts {
        output.extend(parser.push(part));
    }
    output.extend(parser.finish());
    output
}

#[test]
fn every_case_reads_the_same_whole_and_split_at_every_byte() {
    for case in CASES {
        let calls = case.calls.iter().enumerate().map(|(i, &(name, arguments, complete))| ToolCall {
            id: format!("call_a1_{i}"),
            name: name.into(),
            arguments: arguments.into(),
            complete,
        });
        let expected =
            Output { reasoning: case.reasoning.into(), content: case.content.into(), tool_calls: calls.collect() };
        assert_eq!(read(case, [case.text]), expected, "{}", case.name);
        for (at, _) in case.text.char_indices() {
            let (a, b) = case.text.split_at(at);
            assert_eq!(read(case, [a, b]), expected, "{} split at {at}", case.name);
        }
        let chars = case.text.char_indices().map(|(at, c)| &case.text[at..at + c.len_utf8()]);
        assert_eq!(read(case, chars), expected, "{} character by character", case.name);
        for call in &expected.tool_calls {
            if call.complete {
                assert!(
                    serde_json::from_str::<serde_json::Value>(&call.arguments).is_ok_and(|value| value.is_object()),
                    "{}",
                    case.name
                );
            }
        }
    }
}

/// Text is passed on at once unless it may be the start of a tag.
#[test]
fn nothing_is_held_back_longer_than_needed() {
    let mut parser = OutputParser::new(OutputMode { tools: Some(tools()), ..Default::default() });
    assert_eq!(parser.push("Hello"), [Piece::Content("Hello".into())]);
    assert_eq!(parser.push(" <"), []);
    assert_eq!(parser.push("b>"), [Piece::Content(" <b>".into())]);
    parser.push("<tool_call>\n<function=write_file>\n<parameter=text>\n");
    assert_eq!(parser.push("long"), [Piece::ToolCallArguments { index: 0, delta: "long".into() }]);
    assert_eq!(parser.push(" text\n</"), [Piece::ToolCallArguments { index: 0, delta: " text".into() }]);
}
