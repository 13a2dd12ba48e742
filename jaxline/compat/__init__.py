"""What programs written against JAXline rely on."""
