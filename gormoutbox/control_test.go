package gormoutbox

import (
	"strings"
	"testing"
)

func TestParseControl(t *testing.T) {
	t.Parallel()
	for query, want := range map[string]control{
		"":                                    {},
		"SELECT 1":                            {},
		"INSERT INTO savepoint VALUES (1)":    {},
		"SAVEPOINTS s":                        {},
		"ROLLBACKTO s":                        {},
		"-- SAVEPOINT s":                      {},
		"(":                                   {},
		`"SAVEPOINT" s`:                       {},
		"SAVEPOINT sp7301":                    {setSavepoint, "sp7301"},
		"savepoint\n\tA_1$;":                  {setSavepoint, "A_1$"},
		"SAVEPOINT`a b`":                      {setSavepoint, "`a b`"},
		"SAVEPOINT 'a''b' ":                   {setSavepoint, "'a''b'"},
		"SAVEPOINT [a]":                       {setSavepoint, "[a]"},
		`SAVEPOINT "a`:                        {setSavepoint, `"a`},
		`SAVEPOINT "`:                         {setSavepoint, `"`},
		"SAVEPOINT":                           {setSavepoint, ""},
		"RELEASE s":                           {releaseSavepoint, "s"},
		"RELEASE SAVEPOINT s":                 {releaseSavepoint, "s"},
		"RELEASE SAVEPOINT;":                  {releaseSavepoint, "SAVEPOINT"},
		"ROLLBACK TO s":                       {rollbackToSavepoint, "s"},
		"Rollback To Savepoint s":             {rollbackToSavepoint, "s"},
		"ROLLBACK WORK TO s":                  {rollbackToSavepoint, "s"},
		"ROLLBACK TRANSACTION TO SAVEPOINT s": {rollbackToSavepoint, "s"},
		"ROLLBACK TO savepoint":               {rollbackToSavepoint, "savepoint"},
		"ROLLBACK":                            {endTransaction, ""},
		"rollback;":                           {endTransaction, ""},
		"ROLLBACK TRANSACTION":                {endTransaction, ""},
		"ABORT":                               {endTransaction, ""},
		"COMMIT AND CHAIN":                    {endTransaction, ""},
		"END TRANSACTION":                     {endTransaction, ""},
	} {
		if got := parseControl(query); got != want {
			t.Errorf("parseControl(%q) = %v, want %v", query, got, want)
		}
	}
}

func TestKeyOfASavepoint(t *testing.T) {
	t.Parallel()
	for name, want := range map[string][2]string{ // not exact, exact
		"Sp":       {"sp", "sp"},
		`"Sp"`:     {"sp", "Sp"},
		`"S""p"`:   {`s"p`, `S"p`},
		"`S``p`":   {"s`p", "S`p"},
		"[Sp]":     {"sp", "Sp"},
		`""`:       {"", ""},
		`"`:        {`"`, `"`},
		"":         {"", ""},
		"GRÖSSE":   {"grösse", "grösse"},
		`"GRÖSSE"`: {"grösse", "GRÖSSE"},
	} {
		c := control{setSavepoint, name}
		if got := [2]string{c.key(false), c.key(true)}; got != want {
			t.Errorf("keys of %s are %q, want %q", name, got, want)
		}
	}
}

// Any statement can be looked at, and a quoted name comes out as it went in.
func FuzzParseControl(f *testing.F) {
	for _, s := range []string{"s", `a"b`, "SAVEPOINT [x", "ROLLBACK WORK TO", "é", "'", "END;"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if c := parseControl(s); !strings.Contains(s, c.name) {
			t.Errorf("parseControl(%q) made up the name %q", s, c.name)
		}
		for verb, prefix := range map[verb]string{
			setSavepoint: "savepoint", releaseSavepoint: "RELEASE SAVEPOINT", rollbackToSavepoint: "Rollback work to savepoint",
		} {
			query := prefix + ` "` + strings.ReplaceAll(s, `"`, `""`) + `";`
			if c := parseControl(query); c.verb != verb || c.key(true) != s {
				t.Errorf("parseControl(%q) = %v with the key %q", query, c, c.key(true))
			}
		}
	})
}

func TestParseControlDoesNotAllocate(t *testing.T) {
	for _, query := range []string{"SELECT 1", "\n INSERT INTO orders VALUES (1)", "ROLLBACK TO SAVEPOINT s"} {
		if n := testing.AllocsPerRun(100, func() { parseControl(query) }); n != 0 {
			t.Errorf("parseControl(%q) allocates %v times", query, n)
		}
	}
}
