package dialect

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// C35
func TestHeadersRoundTrip(t *testing.T) {
	t.Parallel()
	text := rapid.OneOf(
		rapid.StringN(0, 20, -1),
		rapid.StringOf(rapid.RuneFrom([]rune("\"\\\x01\n\x1f\x7f/<>&{}:, \u2028\u2029\ufffd\ufeff🎉é"))),
	).Filter(func(s string) bool { return !strings.ContainsRune(s, 0) })
	rapid.Check(t, func(t *rapid.T) {
		headers := rapid.MapOfN(text, text, 0, 5).Draw(t, "headers")
		encoded := encodeHeaders(headers)
		var standard map[string]string
		if err := json.Unmarshal([]byte(encoded), &standard); err != nil || !maps.Equal(standard, headers) {
			t.Fatalf("encoding/json reads %s as %q, %v", encoded, standard, err)
		}
		again, err := json.Marshal(headers)
		if err != nil {
			t.Fatal(err)
		}
		spaced := strings.NewReplacer(`":"`, `": "`, `","`, `", "`).Replace(encoded)
		for _, stored := range []string{encoded, string(again)} {
			wantHeaders(t, stored, headers)
		}
		// As jsonb has it, where the texts do not look like the punctuation.
		if !strings.Contains(strings.Join(keysAndValues(headers), ""), `"`) && !strings.ContainsAny(strings.Join(keysAndValues(headers), ""), ":,") {
			wantHeaders(t, spaced, headers)
		}
	})
}

func keysAndValues(headers map[string]string) (all []string) {
	for k, v := range headers {
		all = append(all, k, v)
	}
	return all
}

func wantHeaders(t rapid.TB, stored string, want map[string]string) {
	t.Helper()
	got, err := decodeHeaders(stored)
	if err != nil || !maps.Equal(got, want) {
		t.Fatalf("decodeHeaders(%s) = %q, %v; want %q", stored, got, err, want)
	}
	if len(want) == 0 && got != nil {
		t.Fatalf("decodeHeaders(%s) is empty, want nil", stored)
	}
}

func TestDecodeHeadersWritten(t *testing.T) {
	t.Parallel()
	for stored, want := range map[string]map[string]string{
		`{}`:                         nil,
		`{ }`:                        nil,
		`{"a": "b", "c": "d"}`:       {"a": "b", "c": "d"},
		`{"a":"b"}`:                  {"a": "b"},
		"{\n  \"a\" : \"b\"\n}":      {"a": "b"},
		`{"a":"\u00e9\ud83c\udf89"}`: {"a": "é🎉"},
		`{"":""}`:                    {"": ""},
	} {
		wantHeaders(t, stored, want)
	}
	for _, stored := range []string{``, `null?`, `[]`, `{"a":1}`, `{"a":"b"`, `{"a":"b"}x`, `{"a":"b",}`, `{"a"}`, `{a:"b"}`} {
		if got, err := decodeHeaders(stored); err == nil {
			t.Errorf("decodeHeaders(%s) = %q, want an error", stored, got)
		}
	}
}

func FuzzDecodeHeaders(f *testing.F) {
	for _, seed := range []string{`{"a":"b"}`, `{"a": "b", "c":"d"}`, `{"a":"b",}`, `{"a":"\n"}`, `{"a":"b"} `, `{"":""}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, stored string) {
		var want map[string]string
		if json.Unmarshal([]byte(stored), &want) != nil || strings.ToValidUTF8(stored, "") != stored {
			return // the databases hold valid objects only
		}
		wantHeaders(t, stored, want)
	})
}

func BenchmarkHeaders(b *testing.B) {
	headers := map[string]string{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tenant": "acme", "content-type": "application/json"}
	for b.Loop() {
		if _, err := decodeHeaders(encodeHeaders(headers)); err != nil {
			b.Fatal(err)
		}
	}
}
