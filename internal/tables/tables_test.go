package tables_test

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/gormoutbox/outbox/internal/tables"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var suffixes = []string{"_meta", "_ready_idx", "_due_idx", "_failed_idx", "_dead_idx", "_dead_at_idx", "_delivered_idx"}

func TestValidate(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		name tables.Name
		want string // part of the error; empty: valid
	}{
		"plain":            {name: tables.Name{Table: "outboxer_messages"}},
		"schema":           {name: tables.Name{Schema: "app", Table: "outbox"}},
		"any characters":   {name: tables.Name{Schema: `A"pp`, Table: `Out 'Box'; -- ☃`}},
		"63 bytes":         {name: tables.Name{Schema: strings.Repeat("s", 63), Table: strings.Repeat("t", 63)}},
		"empty":            {name: tables.Name{Schema: "app"}, want: "table name is empty"},
		"64 bytes":         {name: tables.Name{Table: strings.Repeat("t", 64)}, want: "has 64 bytes"},
		"64 bytes, 32 Ä":   {name: tables.Name{Table: strings.Repeat("Ä", 32)}, want: "has 64 bytes"},
		"schema, 64 bytes": {name: tables.Name{Schema: strings.Repeat("s", 64), Table: "t"}, want: "schema name"},
		"NUL":              {name: tables.Name{Table: "a\x00b"}, want: "control"},
		"line break":       {name: tables.Name{Schema: "a\nb", Table: "t"}, want: "control"},
		"not UTF-8":        {name: tables.Name{Table: "a\xff"}, want: "UTF-8"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := test.name.Validate()
			switch {
			case test.want == "" && err != nil:
				t.Errorf("got %v, want no error", err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}

// C13
func TestQuoting(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name                   tables.Name
		messages, meta, failed string
	}{
		{tables.Name{Table: "outbox"}, `"outbox"`, `"outbox_meta"`, `"outbox_failed_idx"`},
		{tables.Name{Schema: "App", Table: "Out Box"}, `"App"."Out Box"`, `"App"."Out Box_meta"`, `"Out Box_failed_idx"`},
		{tables.Name{Schema: `a"b`, Table: `c""d.e`}, `"a""b"."c""""d.e"`, `"a""b"."c""""d.e_meta"`, `"c""""d.e_failed_idx"`},
	} {
		if got := test.name.Messages(); got != test.messages {
			t.Errorf("messages of %+v: %s, want %s", test.name, got, test.messages)
		}
		if got := test.name.Meta(); got != test.meta {
			t.Errorf("meta of %+v: %s, want %s", test.name, got, test.meta)
		}
		if got := test.name.Index("_failed"); got != test.failed {
			t.Errorf("index of %+v: %s, want %s", test.name, got, test.failed)
		}
	}
	if got, want := tables.Literal(`it's a "\`), `'it''s a "\'`; got != want {
		t.Errorf("literal %s, want %s", got, want)
	}
}

// The names are in databases: they never change.
func TestDerivedIsPinned(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ table, suffix, want string }{
		{"outboxer_messages", "_meta", "outboxer_messages_meta"},
		{strings.Repeat("t", 58), "_meta", strings.Repeat("t", 58) + "_meta"},
		{strings.Repeat("t", 59), "_meta", strings.Repeat("t", 49) + "_cd5c3ad3_meta"},
		{strings.Repeat("t", 63), "_dead_at_idx", strings.Repeat("t", 42) + "_7a72e433_dead_at_idx"},
		// The cut would be in the middle of a character: one byte less.
		{strings.Repeat("Ä", 31), "_meta", strings.Repeat("Ä", 24) + "_98ea27d2_meta"},
		{strings.Repeat("☃", 21), "_meta", strings.Repeat("☃", 16) + "_967720c8_meta"},
	} {
		if got := (tables.Name{Table: test.table}).Derived(test.suffix); got != test.want {
			t.Errorf("%s of %s: %s, want %s", test.suffix, test.table, got, test.want)
		}
	}
}

// anyName draws valid table names, many of them of the greatest length.
func anyName() *rapid.Generator[string] {
	characters := []rune(`aZ_ "'.Ä☃😀`)
	return rapid.Custom(func(t *rapid.T) string {
		s := rapid.StringOfN(rapid.SampledFrom(characters), 1, -1, tables.MaxName).Draw(t, "name")
		if rapid.Bool().Draw(t, "fill") {
			s += strings.Repeat("x", tables.MaxName-len(s))
		}
		return s
	})
}

func TestDerivedNamesAreValidAndDistinct(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := tables.Name{Table: anyName().Draw(t, "table")}
		if err := n.Validate(); err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{n.Table: true}
		for _, suffix := range suffixes {
			got := n.Derived(suffix)
			if len(got) > tables.MaxName || !utf8.ValidString(got) || !strings.HasSuffix(got, suffix) {
				t.Errorf("%q of %q: %q", suffix, n.Table, got)
			}
			if seen[got] {
				t.Errorf("%q of %q: %q is the name of something else", suffix, n.Table, got)
			}
			seen[got] = true
		}
	})
}

// C13: names that are equal but for their ends, which the database would cut.
func TestLongNamesDoNotCollide(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for c := range rune(unicode.MaxASCII) {
		if unicode.IsControl(c) {
			continue
		}
		n := tables.Name{Table: strings.Repeat("t", tables.MaxName-1) + string(c)}
		for _, suffix := range suffixes {
			got := n.Derived(suffix)
			if other, ok := seen[got]; ok {
				t.Errorf("%q of %q is also of %q", got, n.Table, other)
			}
			seen[got] = n.Table
		}
	}
}
