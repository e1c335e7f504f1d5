package dialect

import (
	"encoding/json"
	"fmt"
	"strings"
)

const noHeaders = "{}"

// encodeHeaders gives headers as a compact JSON object. Keys and values are
// valid UTF-8 without NUL, so that both databases give them back as they are.
// Unlike encoding/json it leaves <, > and & alone.
func encodeHeaders(headers map[string]string) string {
	if len(headers) == 0 {
		return noHeaders
	}
	size := 2
	for k, v := range headers {
		size += len(k) + len(v) + 6
	}
	b := make([]byte, 0, size)
	sep := byte('{')
	for k, v := range headers {
		b = append(b, sep)
		b = appendJSON(b, k)
		b = append(b, ':')
		b = appendJSON(b, v)
		sep = ','
	}
	return string(append(b, '}'))
}

// appendJSON appends s as a JSON string.
func appendJSON(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	from := 0
	for i := range len(s) {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		b = append(b, s[from:i]...)
		if c < ' ' {
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		} else {
			b = append(b, '\\', c)
		}
		from = i + 1
	}
	b = append(b, s[from:]...)
	return append(b, '"')
}

// decodeHeaders reads a JSON object of strings; nil if it is empty.
func decodeHeaders(text string) (map[string]string, error) {
	if text == noHeaders {
		return nil, nil
	}
	if headers, ok := decodePlain(text); ok {
		return headers, nil
	}
	var headers map[string]string
	if err := json.Unmarshal([]byte(text), &headers); err != nil {
		return nil, fmt.Errorf("headers: %w", err)
	}
	if len(headers) == 0 {
		return nil, nil
	}
	return headers, nil
}

// decodePlain reads the ordinary object: one without escapes, with at most a
// space after each colon and comma, as jsonb has it. It says false to anything
// else, valid or not.
func decodePlain(text string) (map[string]string, bool) {
	if strings.IndexByte(text, '\\') >= 0 || !strings.HasPrefix(text, "{") {
		return nil, false
	}
	headers := make(map[string]string)
	for rest := text[1:]; ; {
		key, after, ok := cutString(rest)
		if !ok || !strings.HasPrefix(after, ":") {
			return nil, false
		}
		value, after, ok := cutString(strings.TrimPrefix(after[1:], " "))
		if !ok || after == "" {
			return nil, false
		}
		headers[key] = value
		if after == "}" {
			return headers, true
		}
		if after[0] != ',' {
			return nil, false
		}
		rest = strings.TrimPrefix(after[1:], " ")
	}
}

// cutString takes a JSON string without escapes off the front of text.
func cutString(text string) (s, after string, ok bool) {
	if !strings.HasPrefix(text, `"`) {
		return "", "", false
	}
	return strings.Cut(text[1:], `"`)
}
